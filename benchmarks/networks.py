"""The yardsticks' networks, over one or two axes, the U-Net's over three too: (B, inputs, *grid)
-> (B, outputs, *grid).

    FNO     x <- x + mlp(gelu(spectral(x) + linear(x)))             Li et al. 2021
    U-Net   x <- x + conv(gelu(limit(conv(gelu(limit(x))))))        Ronneberger et al. 2015

`spectral` keeps the wave numbers 0 <= k < modes of the last axis and -modes <= k < modes of the
axis before, and mixes the channels of each by a complex matrix of its own. The truncated transform
is a product with a cosine and sine table in real arithmetic: the same numbers as by FFT, faster at
these sizes, and nothing that a compiler cannot fuse. Closed domains are continued by their border
values over an eighth of the axis on both sides.

Every level of the U-Net halves the grid and doubles the channels; convolutions reach over the
border around the circle or by repeating the border values. Amplitudes are bounded and not
normalised, as in our operator: a group norm made the errors of roll-outs half as large again.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.layers import bounded


@dataclass(frozen=True)
class FNOConfig:
    width: int = 64
    depth: int = 4
    modes: int = 16      # first wave numbers of each axis, or all
    mlp_ratio: float = 1.0


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


@dataclass(frozen=True)
class UNetConfig:
    width: int = 48    # channels at full resolution
    levels: int = 3    # how often the grid is halved
    depth: int = 1     # residual blocks per resolution, on the way down and on the way up


class UNet(nn.Module):
    """(B, inputs, *grid) -> (B, outputs, *grid), zero at the start; any grid."""

    def __init__(self, config, inputs, outputs, grid, periodic):
        super().__init__()
        c, conv = config, (Conv1d, Conv2d, nn.Conv3d)[len(grid) - 1]
        same = {"kernel_size": 3, "padding": 1,
                "padding_mode": "circular" if periodic else "replicate"}
        widths = [c.width << level for level in range(c.levels + 1)]

        def blocks(width):
            return nn.Sequential(*[ResBlock(conv, width, same) for _ in range(c.depth)])

        def convs(*sizes, **options):
            return nn.ModuleList(conv(*[n * width for n in sizes], **options)
                                 for width in widths[:-1])

        self.inp = conv(inputs, c.width, **same)
        self.hidden = nn.ModuleDict({
            "down": nn.ModuleList(blocks(width) for width in widths[:-1]),
            "merge": convs(1, 2, stride=2, **same),
            "bottom": blocks(widths[-1]),
            "split": convs(2, 1, **same),
            "join": convs(2, 1, kernel_size=1),
            "up": nn.ModuleList(blocks(width) for width in widths[:-1])})
        self.limit = Limit(c.width)
        self.out = conv(c.width, outputs, **same)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        part, skips = self.hidden, []
        x = self.inp(x)
        for blocks, merge in zip(part["down"], part["merge"], strict=True):
            skips.append(blocks(x))
            x = merge(skips[-1])
        x = part["bottom"](x)
        for i in reversed(range(len(skips))):
            x = F.interpolate(x, scale_factor=2)[:, :, *(slice(n) for n in skips[i].shape[2:])]
            x = part["split"][i](x)
            x = part["up"][i](part["join"][i](torch.cat([x, skips[i]], 1)))
        return self.out(F.gelu(self.limit(x)))


class ResBlock(nn.Module):
    """x + conv(gelu(limit(conv(gelu(limit(x))))))"""

    def __init__(self, conv, width, same):
        super().__init__()
        self.limits = nn.ModuleList(Limit(width) for _ in range(2))
        self.convs = nn.ModuleList(conv(width, width, **same) for _ in range(2))

    def forward(self, x):
        y = x
        for limit, conv in zip(self.limits, self.convs, strict=True):
            y = conv(F.gelu(limit(y)))
        return x + y


class Limit(nn.Module):
    """The amplitude over the channels bounded, then a scale and a shift of each channel."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        scale, shift = (p.view(-1, *[1] * (x.ndim - 2)) for p in (self.scale, self.shift))
        return torch.addcmul(shift, bounded(x, axis=1), scale)


class Conv1d(nn.Conv1d):
    """As one product of matrices, with which a training step of a U-Net takes 3.5 instead of 4.5 ms
    on an H200."""

    def forward(self, x):
        """(B, C, n) -> (B, outputs, n / stride)"""
        if self.padding[0]:
            x = F.pad(x, 2 * self.padding, mode=self.padding_mode)
        taps = x.unfold(2, *self.kernel_size, *self.stride).transpose(1, 2)  # (B, n, C, kernel)
        return F.linear(taps.flatten(2), self.weight.flatten(1), self.bias).transpose(1, 2)


class Conv2d(nn.Conv2d):
    """Borders of no or one point, around the circle or repeated, by copies, as the gradient of
    `F.pad` scatters; channels last, as tensor cores want them. Forward and backward on an H200 take
    two thirds of the time."""

    def forward(self, x):
        for axis in (2, 3) if self.padding[0] else ():
            first, last = x.narrow(axis, 0, 1), x.narrow(axis, -1, 1)
            ends = (last, first) if self.padding_mode == "circular" else (first, last)
            x = torch.cat([ends[0], x, ends[1]], axis)
        weight = self.weight.contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, weight, self.bias, self.stride)
