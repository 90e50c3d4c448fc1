"""The learned codec: the patch codec plus what neighbouring patches know.

With a = V^T (x - center) all K coefficients of a patch, s their standard deviations and s* that of
the first one that is dropped, the codec of width D is

    encode   z = bound(a_D / s_D + (s* / s_D) g(a))          a_D the first D coefficients
    decode   a = [s_D y, 0] + s* f(y),  y = free(z)         x = center + V a
    at x     u(x) = decoded grid, interpolated to x, + s* h(y, x)

g, f: residual convolutions over the token grid, circular along periodic axes, replicating along
closed ones; h: attention from the Fourier-encoded place of x in its token to the tokens around it.
All three start at zero, so the codec starts as the patch codec of the same width, and
s* is the size of what there is to learn: it makes the first steps well scaled at any compression.

bound(y) = y / sqrt(1 + (y/b)^2) keeps |z| < b whatever the field, and `free` undoes it exactly: a
shock (|y| of 30 in late components) loses nothing, and ordinary values are left nearly alone.
"""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.models.any_point import HEADS, AnyPoint, interpolate, zero
from ups.models.codec import Codec, PatchCodec, truncate
from ups.relative_error import mean_relative_error


@dataclass(frozen=True)
class GridCodecConfig:
    hidden: int = 96  # channels of the convolutions
    depth: int = 3  # residual blocks in the encoder and in the decoder

    def __post_init__(self):
        if self.hidden < 1 or self.hidden % HEADS:
            raise ValueError(f"hidden {self.hidden} must be a multiple of {HEADS}.")


BOUND = 10.0  # |z| stays below
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def padded(x: Tensor, periodic: tuple[bool, ...]) -> Tensor:
    """(B, C, *tokens) with one token more at every end: around the circle, or the last repeated."""
    for axis, circle in enumerate(periodic, start=2):
        first, last = x.narrow(axis, 0, 1), x.narrow(axis, -1, 1)
        x = torch.cat([last, x, first] if circle else [first, x, last], axis)
    return x


class Convolution(nn.Module):
    """x + W2 gelu(W1 x), W1 over 3 tokens an axis; the second starts at zero."""

    def __init__(self, dim: int, periodic: tuple[bool, ...]):
        super().__init__()
        self.periodic, axes = periodic, len(periodic)
        self.mix = CONV[axes](dim, 2 * dim, 3)
        self.out = zero(CONV[axes](2 * dim, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.mix(padded(x, self.periodic))))


class Context(nn.Module):
    """Tokens (B, N, inputs) -> features (B, N, hidden), and outputs that are zero at first."""

    def __init__(self, inputs: int, outputs: int, cfg: GridCodecConfig, tokens, periodic):
        super().__init__()
        self.tokens, self.periodic, axes = tokens, periodic, len(tokens)
        blocks = [Convolution(cfg.hidden, periodic) for _ in range(cfg.depth)]
        self.blocks = nn.Sequential(CONV[axes](inputs, cfg.hidden, 1), *blocks)
        self.out = zero(nn.Linear(cfg.hidden, outputs))
        self.line = zero(CONV[axes](inputs, outputs, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.mT.unflatten(2, self.tokens)
        features = self.blocks(x).flatten(2).mT
        return features, self.out(features) + self.line(padded(x, self.periodic)).flatten(2).mT


class GridCodec(Codec):
    """Patch codec with all components, and networks on its coefficients."""

    def __init__(self, config: dict):
        super().__init__(config)
        cfg = GridCodecConfig(**{k: config[k] for k in GridCodecConfig.__dataclass_fields__})
        width, total = config["width"], self.channels * math.prod(self.patch)
        self.first = min(width, total - 1)  # the first dropped component
        self.full = PatchCodec({**config, "kind": "patch", "width": total})
        self.encoder = Context(total, width, cfg, self.tokens, self.periodic)
        self.decoder = Context(width, total, cfg, self.tokens, self.periodic)
        self.point = AnyPoint(cfg.hidden, self)

    def encode(self, u: Tensor) -> Tensor:
        width, scale, rest = self.width, self.full.scale, self.full.scale[self.first]
        a = self.full.encode(u) * (scale / scale.maximum(rest))
        y = a[..., :width] + self.encoder(a)[1] * (rest / scale[:width])
        return y / (1 + (y / BOUND).square()).sqrt()

    def free(self, z: Tensor) -> Tensor:
        """Undo the bound; a latent outside it, from an operator gone astray, stays finite."""
        z = z.clamp(-0.999 * BOUND, 0.999 * BOUND)
        return z / (1 - (z / BOUND).square()).sqrt()

    def decode(self, z: Tensor) -> Tensor:
        return self._decode(z)[1]

    def decode_at(self, z: Tensor, points: Tensor) -> Tensor:
        return self._read(*self._decode(z), points)

    def _decode(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = self.free(z), self.full.scale
        features, correction = self.decoder(y)
        y = F.pad(y, (0, len(scale) - y.shape[-1]))
        return features, self.full.decode(y + correction * (scale[self.first] / scale))

    def _read(self, features: Tensor, u: Tensor, points: Tensor) -> Tensor:
        size = self.full.scale[self.first] * self.full.std
        smooth = interpolate(u, points, self.periodic, self.offset)
        return smooth + size * self.point(features, points)

    def forward(self, u: Tensor, index: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """D(E(u)), the any-point decoder's values (B, Q, C), and the error (B,) of E(D(z)) = z."""
        z = self.encode(u)
        features, u_hat = self._decode(z)
        values = self._read(features, u_hat, self.points(index))
        z = z.detach() + noise  # latents that an operator predicts are inverted too
        loop = self.weight * (self.encode(self.decode(z)) - z).square()
        size = (self.weight * z.square()).sum((1, 2))
        return u_hat, values, (loop.sum((1, 2)) / size).clamp(min=1e-16).sqrt()


def from_patch(patch: PatchCodec, width: int, cfg: GridCodecConfig) -> GridCodec:
    """The grid codec that equals `patch`, which has all components, cut to `width`."""
    weight = truncate(patch, width).weight
    codec = GridCodec({**patch.config, "kind": "grid", "width": width, **asdict(cfg)})
    codec.to(weight.dtype).full.load_state_dict(patch.state_dict())
    for name in ("seen", "input_mean", "input_std"):
        getattr(codec, name).copy_(getattr(patch, name))
    codec.weight.copy_(weight)
    return codec


@torch.no_grad()
def measure_weight(codec: GridCodec, u: Tensor, step: float = 1e-2) -> None:
    """Set `weight` to what a small error in each latent channel does to the decoded field."""
    z = codec.encode(u)
    field, size = codec.decode(z), torch.zeros_like(codec.weight)
    sign = torch.randint(0, 2, (*z.shape[:2], 1), generator=torch.Generator().manual_seed(0))
    sign = 2 * sign.to(z) - 1  # tokens err independently
    for d, unit in enumerate(torch.eye(len(size), device=z.device, dtype=z.dtype)):
        change = (codec.decode(z + step * sign * unit) - field).movedim(1, -1)
        size[d] = (change / codec.full.std).square().mean()
    codec.weight.copy_(size / size.mean())


def codec_loss(model, batch: dict, point: float = 0.3, inverse: float = 0.1) -> Tensor:
    """Relative errors (B,) of D(E(u)) = u, of values at random points, and of E(D(z)) = z.

    batch: u (B, C, *grid), noise (B, N, D) on the latents, and index (B, Q) of the grid values to
    query, the same in all rows.
    """
    u, index = batch["u"], batch["index"][0]
    u_hat, values, loop = model(u, index, batch["noise"])
    queried = mean_relative_error(values.mT, u.flatten(2)[..., index])
    return mean_relative_error(u_hat, u) + point * queried + inverse * loop
