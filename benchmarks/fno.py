"""A Fourier neural operator (Li et al. 2021) over one or two axes, as a yardstick.

    x <- x + mlp(gelu(spectral(x) + linear(x)))           x (B, *grid, width), residual blocks

`spectral` keeps the wave numbers 0 <= k < modes of the last axis and -modes <= k < modes of the
axis before, and mixes the channels of each by a complex matrix of its own. The truncated transform
is a product with a cosine and sine table in real arithmetic: the same numbers as by FFT, faster at
these sizes, and nothing that a compiler cannot fuse. Closed domains are continued by their border
values over an eighth of the axis on both sides.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ups.config import check


@dataclass(frozen=True)
class FNOConfig:
    width: int = 64
    depth: int = 4
    modes: int = 16      # first wave numbers of each axis, or all
    mlp_ratio: float = 1.0

    def __post_init__(self):
        check(self, width=(1, math.inf), depth=(1, math.inf), modes=(1, math.inf),
              mlp_ratio=(0.1, math.inf))


class FNO(nn.Module):
    """(B, inputs, *grid) -> (B, outputs, *grid), zero at the start."""

    def __init__(self, config, inputs, outputs, grid, periodic):
        super().__init__()
        self.grid, self.periodic = grid, periodic
        self.margin = [0 if periodic else n // 8 for n in grid]
        padded = [n + 2 * m for n, m in zip(grid, self.margin, strict=True)]
        self.inp = nn.Linear(inputs, config.width)
        self.hidden = nn.ModuleList(FNOBlock(config, padded) for _ in range(config.depth))
        self.head = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(2 * config.width, outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        if not self.periodic:
            x = F.pad(x, [m for m in reversed(self.margin) for _ in range(2)], mode="replicate")
        x = self.inp(x.movedim(1, -1))
        for block in self.hidden:
            x = block(x)
        for axis, (m, n) in enumerate(zip(self.margin, self.grid, strict=True), start=1):
            x = x.narrow(axis, m, n)
        return self.out(F.gelu(self.head(x))).movedim(-1, 1)


class FNOBlock(nn.Module):
    def __init__(self, config, grid):
        super().__init__()
        width, hidden = config.width, int(config.mlp_ratio * config.width)
        self.spectral = Spectral(width, grid, config.modes)
        self.linear = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        return x + self.mlp(F.gelu(self.spectral(x) + self.linear(x)))


class Spectral(nn.Module):
    """Truncated Fourier transform, one complex matrix per wave vector, and back: (B, *grid, C).

    A complex axis is stored as a pair (real, imaginary) right behind the axis that made it.
    """

    def __init__(self, width, grid, modes):
        super().__init__()
        *first, n = grid
        k = torch.arange(min(modes, n // 2 + 1), dtype=torch.float64)
        angle = 2 * math.pi / n * k * torch.arange(n, dtype=torch.float64)[:, None]  # (n, k)
        twice = torch.where((k == 0) | (2 * k == n), 1.0, 2.0) / n
        wave = torch.stack([angle.cos(), -angle.sin()], 1)  # (n, 2, k)
        tables = {"analysis": wave.flatten(1).T, "synthesis": (twice * wave).flatten(1)}
        self.shape, self.count = (2, len(k)), len(k)
        if first:
            n, m = first[0], min(modes, first[0] // 2)
            k = torch.arange(-m, m, dtype=torch.float64)
            angle = 2 * math.pi / n * k[:, None] * torch.arange(n, dtype=torch.float64)  # (k, n)
            turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], -1)
            turn = turn.unflatten(-1, (2, 2)).transpose(1, 2)  # (k, 2, n, 2): by exp(-i angle)
            tables |= {"analysis2": turn.flatten(2).flatten(0, 1),
                       "synthesis2": turn.flatten(2).flatten(0, 1).T / n}  # of a unitary matrix
            self.count *= 2 * m
        for name, table in tables.items():
            self.register_buffer(name, table.float().contiguous(), persistent=False)
        scale = 1 / math.sqrt(2 * width)  # real and imaginary parts side by side
        self.weight = nn.Parameter(scale * torch.randn(self.count, 1, width, 2 * width))

    def forward(self, x):
        batch, width = len(x), x.shape[-1]
        a = torch.matmul(self.analysis, x)                      # (B, [n,] 2 * k, C)
        if two := x.ndim == 4:
            a = a.unflatten(2, self.shape).flatten(3).flatten(1, 2)
            a = torch.matmul(self.analysis2, a)                 # (B, K * 2, k * C)
            a = a.unflatten(1, (-1, 2)).unflatten(3, (-1, width)).permute(1, 3, 0, 2, 4)
        else:
            a = a.unflatten(1, self.shape).permute(2, 0, 1, 3)
        a = a.reshape(self.count, 2 * batch, width)             # wave vectors first
        b = torch.bmm(a, self.weight[:, 0]).view(self.count, batch, 2, 2, width)
        b = torch.stack([b[:, :, 0, 0] - b[:, :, 1, 1], b[:, :, 0, 1] + b[:, :, 1, 0]], 2)
        if two:
            b = b.unflatten(0, (-1, self.shape[1])).permute(2, 0, 3, 1, 4)  # (B, K, 2, k, C)
            b = torch.matmul(self.synthesis2, b.flatten(3).flatten(1, 2))   # (B, n * 2, k * C)
            b = b.unflatten(1, (-1, 2)).unflatten(3, (-1, width)).flatten(2, 3)
        else:
            b = b.permute(1, 2, 0, 3).flatten(1, 2)
        return torch.matmul(self.synthesis, b)
