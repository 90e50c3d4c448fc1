"""Read a field at any point: by interpolation, and by attention to latent tokens.

Points lie in [0, 1]^d of the domain; value i of the n along an axis stands at (i + offset) / n.
Cell centres have offset 1/2, every fourth of them (stride 4) has offset 1/8.
"""

import math

import torch
from torch import Tensor, nn

HEADS = 4        # of the attention to latent tokens
FREQUENCIES = 4  # of the place inside a token


def interpolate(u: Tensor, points: Tensor, periodic: tuple[bool, ...], offset: float = 0.5,
                fourier: bool = True) -> Tensor:
    """Read u (B, C, *grid) at points (P, d) -> (B, P, C), linearly on closed axes; on periodic ones
    by Fourier series, or linearly without `fourier`."""
    weights = [_axis_weights(x, n, offset, circle, circle and fourier) for x, n, circle in
               zip(points.double().unbind(1), u.shape[2:], periodic, strict=True)]
    with torch.autocast(u.device.type, enabled=False):
        v = torch.einsum("bc...i,pi->bpc...", u, weights.pop().to(u.dtype))
        while weights:
            v = torch.einsum("bpc...i,pi->bpc...", v, weights.pop().to(u.dtype))
    return v


def _axis_weights(x: Tensor, n: int, offset: float, periodic: bool, fourier: bool) -> Tensor:
    """How much each of n grid values counts at x (P,) -> (P, n); float64 for phases of 1000 rad."""
    i = torch.arange(n, device=x.device, dtype=x.dtype)
    t = x * n - offset  # in grid steps from value 0
    if fourier:
        k = torch.arange(1, n // 2 + 1, device=x.device, dtype=x.dtype)
        at, of = 2 * math.pi * k * t[:, None] / n, 2 * math.pi * k[:, None] * i / n
        twice = torch.where(2 * k == n, 1, 2)  # the Nyquist mode has no partner
        return (1 + (at.cos() * twice) @ of.cos() + (at.sin() * twice) @ of.sin()) / n
    distance = (t if periodic else t.clamp(0, n - 1))[:, None] - i
    distance = (distance + n / 2) % n - n / 2 if periodic else distance
    return (1 - distance.abs()).clamp(min=0)


def zero(layer: nn.Module) -> nn.Module:
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    return layer


class AnyPoint(nn.Module):
    """Attention from points (P, d) to the 3^d tokens around each -> (B, P, C).

    The weight of a token falls to zero at the rim of the neighbourhood, so that values are
    continuous where the nearest token changes.
    """

    def __init__(self, dim: int, codec):
        super().__init__()
        self.offset = codec.offset
        self.axes = list(zip(codec.grid, codec.patch, codec.tokens, codec.periodic, strict=True))
        code = 2 * len(codec.grid) * FREQUENCIES
        self.query = nn.Linear(code, dim)
        self.place = nn.Linear(code, 3 * dim)
        self.read = nn.Linear(dim, 2 * dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(),
                                 zero(nn.Linear(2 * dim, codec.channels)))
        frequency = math.pi / 2 * torch.arange(1, FREQUENCIES + 1)
        self.register_buffer("frequency", frequency, persistent=False)

    def fourier(self, place: Tensor) -> Tensor:
        angle = (place[..., None] * self.frequency).flatten(-2)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def forward(self, features: Tensor, points: Tensor) -> Tensor:
        index = torch.zeros(len(points), 1, dtype=torch.int64, device=points.device)
        place = features.new_zeros(len(points), 1, 0)
        for x, (n, p, t, periodic) in zip(points.unbind(1), self.axes, strict=True):
            x = (x * n - self.offset + 0.5) / p  # in tokens; the first one covers [0, 1]
            near = x.floor().long()[:, None] + torch.arange(-1, 2, device=x.device)
            away = (x[:, None] - near - 0.5).to(place.dtype)  # in (-1.5, 1.5)
            near = near % t if periodic else near.clamp(0, t - 1)
            index = (index[:, :, None] * t + near[:, None]).flatten(1)  # (P, M)
            away = away.repeat(1, place.shape[1])[..., None]
            place = torch.cat([place.repeat_interleave(3, 1), away], -1)  # (P, M, d)

        key, value = self.read(features)[:, index].chunk(2, -1)  # (B, P, M, dim)
        to_key, gain, to_value = self.place(self.fourier(place)).chunk(3, -1)
        key, value = key + to_key, value * (1 + gain) + to_value
        # four times the place in the nearest token: periodic, so nothing jumps at its edge
        query = self.query(self.fourier(4 * place[:, place.shape[1] // 2]))  # (P, dim)

        heads = (HEADS, -1)
        score = (query[:, None] * key).unflatten(-1, heads).sum(-1)  # (B, P, M, heads)
        score = score / math.sqrt(query.shape[-1] / HEADS)
        rim = (math.pi / 3 * place).cos().square().prod(-1, keepdim=True).clamp(min=1e-9)
        share = (score + rim.log()).softmax(2)
        return self.mlp((share[..., None] * value.unflatten(-1, heads)).sum(2).flatten(-2))
