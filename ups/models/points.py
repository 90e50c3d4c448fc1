"""Convolutions on the points of the tokens, around a body: the top of a U-Net whose bottom it is.

    f = down(B z)                  features of every point; B z are the points, of a linear codec,
                                   less its mean patch
    a, y = body(z, f)              tokens see the features of their points, and answer with others
    update = a + B^-1 up(f + y)

Large tokens have them on coarser grids too, each of half as many points along every axis, until
they are two points wide (or odd); down and up go through all of these. A layer over tokens has to
learn each place inside of them by itself, a convolution all at once.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.codec import from_patches, to_patches
from ups.models.layers import bounded
from ups.models.precision import exact_linear


class Points(nn.Module):
    """`dim` channels on the points of a task's tokens, twice as many on every coarser grid; its
    part of the update starts at zero."""

    def __init__(self, dim, spec):
        super().__init__()
        self.patch, axes = spec.patch, len(spec.patch)
        self.tokens = spec.tokens[-axes:]
        self.cell, widths = spec.patch, [dim]  # points of a token on the coarsest grid
        while all(n > 2 and n % 2 == 0 for n in self.cell):
            self.cell = tuple(n // 2 for n in self.cell)
            widths.append(2 * widths[-1])
        self.width = math.prod(self.cell) * widths[-1]  # features of a token
        basis = torch.tensor(spec.points, dtype=torch.float64)  # (channels * points, D)
        change = torch.tensor(spec.change or (1.0,) * spec.width, dtype=torch.float64)
        typical = (basis * change).square().sum(1).mean().sqrt()  # change of a point in a step
        inverse = torch.linalg.pinv(basis) * (typical / change.clamp(min=1e-9)[:, None])
        self.register_buffer("basis", basis.float(), persistent=False)
        self.register_buffer("inverse", inverse.float(), persistent=False)

        conv = (Conv1d, Conv2d, nn.Conv3d)[axes - 1]
        channels = len(basis) // math.prod(spec.patch)
        same = {"kernel_size": 3, "padding": 1,
                "padding_mode": "circular" if spec.periodic else "replicate"}

        def blocks():
            return nn.ModuleList(GatedConv(conv, width, same) for width in widths)

        self.inp = Pointwise(channels, dim, exact=True)
        self.hidden = nn.ModuleDict({  # whose matrices are Muon's
            "down": blocks(),
            "merge": nn.ModuleList(conv(n, 2 * n, 2, stride=2) for n in widths[:-1]),
            "split": nn.ModuleList(Pointwise(2 * n, n) for n in widths[:-1]),
            "up": blocks()})
        self.out = Pointwise(dim, channels, exact=True)
        for p in self.out.parameters():
            nn.init.zeros_(p)

    def down(self, z):
        """Latents (B, N, D) -> features (B, dim, *grid), and those of every coarser grid"""
        u = from_patches(exact_linear(z, self.basis), self.patch, self.tokens)
        first, *coarser = self.hidden["down"]
        features = [first(self.inp(u))]
        for merge, block in zip(self.hidden["merge"], coarser, strict=True):
            features.append(block(merge(features[-1])))
        return features

    def cut(self, features):
        """The coarsest ones as (B, N, features of a token)"""
        return to_patches(features[-1], self.cell)

    def up(self, y, features):
        """(B, N, features of a token), and those on the way down -> (B, N, D)"""
        *rest, f = features
        y = self.hidden["up"][-1](f + from_patches(y, self.cell, self.tokens))
        for i, f in reversed(list(enumerate(rest))):
            y = self.hidden["up"][i](f + doubled(self.hidden["split"][i](y)))
        return exact_linear(to_patches(self.out(y), self.patch), self.inverse)


def doubled(x):
    """Every point of (B, C, *grid) twice along each axis; the gradient of `F.interpolate` is
    summed in any order on a GPU."""
    for axis in range(2, x.ndim):
        x = x.repeat_interleave(2, axis)
    return x


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


class Pointwise(nn.Linear):
    """One product at every point; as convolutions, those from or to a few channels are slow."""

    def __init__(self, inputs, outputs, exact=False):
        super().__init__(inputs, outputs)
        self.product = exact_linear if exact else F.linear

    def forward(self, x):
        """(B, C, *grid) -> (B, outputs, *grid), channels last"""
        return self.product(x.movedim(1, -1), self.weight, self.bias).movedim(-1, 1)


class GatedConv(nn.Module):
    """x + out(silu(a) * b), bounded as in the blocks; a and b see the points around."""

    def __init__(self, conv, width, same):
        super().__init__()
        self.inp = conv(width, 2 * width, **same)
        self.out = Pointwise(width, width)

    def forward(self, x):
        a, b = self.inp(x).chunk(2, dim=1)
        return x + self.out(bounded(F.silu(a) * b, axis=1))
