"""Fields to latent tokens and back: the interface, and the patch codec in closed form.

A codec cuts the grid into patches; patch n of a field, normalised per channel, is x_n in R^K with
K = channels * points of a patch. With the covariance of patches cov = V diag(s^2) V^T the patch
codec keeps the leading D principal components at unit variance,

    z_n = diag(1/s) V^T (x_n - center)          x_n = center + V diag(s) z_n + dropped components,

so that |x - x'|^2 = sum_d s_d^2 |z_d - z'_d|^2: `weight` is s^2 scaled to mean 1.

nRMSE is the mean over samples, frames and channels of |p - y|_2 / |y|_2, norms over space; a
channel that is zero everywhere has no relative error and is left out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.models.any_point import interpolate
from ups.models.precision import products


@dataclass(frozen=True)
class CodecConfig:
    kind: str = "patch"       # patch: closed form, fitted here; grid: learned by train_codec.py
    patch: int = 0            # grid points per token and axis; 0: 4 where the grid suits it
    components: str = "auto"  # latent channels per token: a number, all, or auto
    error: float = 1e-4       # nRMSE, 0 to 1, that components auto may lose
    dtype: str = "float32"    # of the cached latents: float32, float16 or bfloat16

    def __post_init__(self):
        if self.kind not in ("patch", "grid"):
            raise ValueError(f"kind {self.kind}: it is patch or grid.")
        if not (self.components in ("auto", "all") or self.components.isdecimal()):
            raise ValueError(f"components {self.components}: it is auto, all or a number.")
        if self.patch < 0 or not 0 <= self.error <= 1:
            raise ValueError(f"patch {self.patch}, error {self.error:g}: patch is 0 or more, and "
                             "error between 0 and 1.")


def build_codec(config: dict) -> "Codec":
    """Rebuild a codec from its `config`; its weights come from `load_state_dict`."""
    from ups.models.grid_codec import GridCodec  # it is built on this file

    return (GridCodec if config["kind"] == "grid" else PatchCodec)(config)


class Codec(nn.Module):
    """u (B, C, *grid) -> encode -> z (B, N, D) -> decode -> u; decode_at reads u at any point.

    `config` holds plain values: kind, facts of the data, patch (of each axis), width, offset.
    Channels that are given (inputs) become tokens without loss: standardised patches.
    """

    def __init__(self, config: dict):
        super().__init__()
        self.config, facts = config, config["facts"]
        self.grid, self.patch = tuple(facts["grid"]), tuple(config["patch"])
        self.periodic = tuple(kind == "periodic" for kind in facts["boundary"])
        self.offset = config["offset"]
        self.tokens = tuple(n // p for n, p in zip(self.grid, self.patch, strict=True))
        self.width, self.channels = config["width"], len(facts["channels"])
        given = len(facts["inputs"])
        self.inputs = given * math.prod(self.patch)  # values of an input token
        self.register_buffer("weight", torch.ones(self.width))
        self.register_buffer("seen", torch.zeros(2, self.channels))  # least, largest value
        self.register_buffer("input_mean", torch.zeros(given))
        self.register_buffer("input_std", torch.ones(given))

    def encode_inputs(self, v: Tensor) -> Tensor:
        """Given channels (B, E, *grid) as tokens (B, N, E * points of a patch)."""
        v = (v.movedim(1, -1) - self.input_mean) / self.input_std
        return to_patches(v.movedim(-1, 1), self.patch)

    def decode_inputs(self, x: Tensor) -> Tensor:
        """The inverse of `encode_inputs`."""
        v = from_patches(x, self.patch, self.tokens).movedim(1, -1)
        return (v * self.input_std + self.input_mean).movedim(-1, 1)

    def points(self, index: Tensor) -> Tensor:
        """Where the grid values of flat index (P,) stand: (P, d), float64."""
        places = []
        for n in reversed(self.grid):  # torch.unravel_index copies from the host: no CUDA graph
            places.insert(0, ((index % n).double() + self.offset) / n)
            index = index // n
        return torch.stack(places, -1)

    def decode_at(self, z: Tensor, points: Tensor) -> Tensor:
        """Values (B, P, C) at points (P, d): the decoded grid, interpolated."""
        return interpolate(self.decode(z), points, self.periodic, self.offset)


class PatchCodec(Codec):
    """Principal components of patches; exact inverse up to the dropped components.

    In float32 as it is: bfloat16 would cost three digits of a field, TF32 two.
    """

    def __init__(self, config: dict):
        super().__init__(config)
        total = self.channels * math.prod(self.patch)
        for name, shape in {"mean": self.channels, "std": self.channels, "center": total,
                            "basis": (total, self.width), "scale": self.width}.items():
            self.register_buffer(name, torch.ones(shape))

    def encode(self, u: Tensor) -> Tensor:
        with products("highest"), torch.autocast(u.device.type, enabled=False):
            x = ((u.movedim(1, -1) - self.mean) / self.std).movedim(-1, 1)
            return (to_patches(x, self.patch) - self.center) @ (self.basis / self.scale)

    def decode(self, z: Tensor) -> Tensor:
        with products("highest"), torch.autocast(z.device.type, enabled=False):
            x = self.center + z.to(self.basis.dtype) @ (self.basis * self.scale).mT
            u = from_patches(x, self.patch, self.tokens).movedim(1, -1)
            return (u * self.std + self.mean).movedim(-1, 1)


def fit_patch(batches, val_batches, *, facts, patch, inputs=None, components="auto", error=1e-3,
              offset=0.5) -> PatchCodec:
    """Fit a patch codec to `batches()`, an iterator over fields (B, C, *grid) of the train split,
    and to `inputs()`, one over the channels (B, E, *grid) that are given.

    `facts` are those of the data as plain values; `patch` is what `patch_sizes` says for each axis.

    One pass sums the first and second moments of patches in float64, whatever the batch size.
    `components` is a number, "all", or "auto": the fewest with an nRMSE of at most `error` over
    `val_batches()`.
    """
    count, first, second, seen = 0, 0, 0, []
    for u in batches():
        x = to_patches(u.double(), patch).flatten(0, 1)
        count, first, second = count + len(x), first + x.sum(0), second + x.mT @ x
        seen.append(torch.stack(u.movedim(1, 0).flatten(1).cpu().aminmax(dim=1)))
        dtype = u.dtype
    seen = torch.stack(seen)
    seen = torch.stack([seen[:, 0].amin(0), seen[:, 1].amax(0)])
    first, second = first.cpu() / count, second.cpu() / count
    size = math.prod(patch)
    mean = first.view(-1, size).mean(1)
    std = (second.diagonal().view(-1, size).mean(1) - mean**2).clamp(min=0).sqrt()
    constant = std <= 1e-7 * mean.abs()
    if constant.all():
        raise ValueError("all fields are constant: there is nothing to learn.")
    std[constant] = 1.0
    wide = std.repeat_interleave(size)
    variance, basis = torch.linalg.eigh((second - first.outer(first)) / wide.outer(wide))
    variance, basis = variance.flip(0), basis.flip(1)
    # A generic direction sets the sign; the largest entry of an antisymmetric component is a tie.
    generic = torch.arange(1.0, len(basis) + 1, dtype=torch.float64).square().sin()
    basis = basis * torch.where(generic @ basis < 0, -1.0, 1.0)
    floor = max(1e-12 * variance[0].item(), 1e-60)  # rounding is not blown up to unit variance
    scale = variance.clamp(min=floor).sqrt()

    center = (first - mean.repeat_interleave(size)) / wide
    codec = PatchCodec(dict(kind="patch", facts=facts, patch=list(patch), width=len(basis),
                            offset=offset))
    input_mean, input_std = _moments(inputs() if facts["inputs"] else (), len(facts["inputs"]))
    codec.double().load_state_dict(dict(mean=mean, std=std, center=center, basis=basis, scale=scale,
                                        weight=scale, seen=seen, input_mean=input_mean,
                                        input_std=input_std))
    errors = component_errors(codec, val_batches())  # always: the val split is looked at once
    named = {"auto": max(1, int((errors <= error).nonzero()[0])), "all": len(basis)}
    return truncate(codec, named.get(components, components)).to(dtype)


def _moments(batches, channels) -> tuple[Tensor, Tensor]:
    """Mean and deviation (E,) over all values of the inputs (B, E, *grid)."""
    count, first, second = 0, torch.zeros(channels).double(), torch.zeros(channels).double()
    for v in batches:
        v = v.cpu().double().movedim(1, -1).flatten(0, -2)
        count, first, second = count + len(v), first + v.sum(0), second + v.square().sum(0)
    mean, square = first / max(count, 1), second / max(count, 1)
    std = (square - mean**2).clamp(min=0).sqrt()
    return mean, torch.where(std > 1e-7 * mean.abs(), std, 1.0)


def truncate(codec: PatchCodec, width: int) -> PatchCodec:
    if not 1 <= width <= len(codec.scale):
        raise ValueError(f"{width} components asked for; this codec has 1 to {len(codec.scale)}.")
    short, scale = PatchCodec({**codec.config, "width": width}), codec.scale[:width]
    short.to(scale.dtype).load_state_dict({**codec.state_dict(), "basis": codec.basis[:, :width],
                                           "scale": scale, "weight": scale**2 / (scale**2).mean()})
    return short


def component_errors(codec: PatchCodec, batches) -> Tensor:
    """nRMSE of keeping k = 0..K components, all in one pass.

    Coefficients a (N, K) beyond k weigh sum_{i,j >= k} (a^T a)_ij (V_c^T V_c)_ij in channel c.
    """
    total = codec.width
    overlap = codec.basis.view(codec.channels, -1, total)
    overlap = (overlap.mT @ overlap).triu()  # (C, K, K), upper triangle counts twice
    overlap = 2 * overlap - torch.diag_embed(overlap.diagonal(dim1=1, dim2=2))
    errors, count = torch.zeros(total + 1, dtype=torch.float64), 0
    for batch in batches:
        for u in batch.cpu().double().split(max(1, 2**22 // total**2)):
            a = codec.encode(u) * codec.scale
            rest = torch.einsum("bij,cij->bci", a.mT @ a, overlap)
            rest = rest.flip(-1).cumsum(-1).flip(-1)  # from the end: nothing cancels
            rest = F.pad(rest.clamp(min=0), (0, 1)).sqrt()  # (B, C, K + 1)
            norm = u.flatten(2).norm(dim=2) / codec.std
            errors += (rest[norm > 0] / norm[norm > 0][:, None]).sum(0)
            count += int((norm > 0).sum())
    if not count:
        raise ValueError("the val split is empty, or zero: there is nothing to judge a codec by.")
    return errors / count


def patch_sizes(grid, wanted) -> tuple[int, ...]:
    """The patch size of each axis: the divisor of its points that is nearest to what is wanted."""
    sizes = []
    for n, near in zip(grid, wanted, strict=True):
        fits = [k for k in range(1, n + 1) if n % k == 0]
        size = min(fits, key=lambda k: (max(k / near, near / k), k))
        if not size <= 4 * near <= 16 * size and size != n:
            raise ValueError(f"no patch near {near} divides an axis of {n} points; patches of "
                             f"{', '.join(map(str, fits))} do.")
        sizes.append(size)
    return tuple(sizes)


def to_patches(u: Tensor, patch) -> Tensor:
    """(B, C, *grid) -> (B, N, C * points of a patch)."""
    for axis, p in enumerate(patch):
        u = u.unflatten(2 + 2 * axis, (-1, p))
    u = u.permute(0, *range(2, u.ndim, 2), 1, *range(3, u.ndim, 2))  # batch, tokens, channel, patch
    return u.flatten(len(patch) + 1).flatten(1, len(patch))


def from_patches(x: Tensor, patch, tokens) -> Tensor:
    """The inverse of `to_patches`."""
    d = len(patch)
    x = x.unflatten(2, (-1, *patch)).unflatten(1, tokens)
    x = x.permute(0, d + 1, *[i for axis in range(d) for i in (1 + axis, d + 2 + axis)])
    return x.reshape(*x.shape[:2], *[t * p for t, p in zip(tokens, patch, strict=True)])
