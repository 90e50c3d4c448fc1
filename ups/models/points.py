"""Convolutions on the points of the tokens, around a body: the top of a U-Net whose bottom it is.

    f = down(B z)                  features of every point; B z are the points, of a linear codec
    a, y = body(z, f)              tokens see the features of their points, and answer with others
    update = a + B^-1 up(y, f)

A layer over tokens has to learn each place inside of them by itself, a convolution all at once. On
fronts as steep as the grid allows (swe2d, 32 x 32) half as many steps of training were enough.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.codec import from_patches, to_patches
from ups.models.layers import bounded


class Points(nn.Module):
    """`dim` channels on the points of a task's tokens; its part of the update starts at zero."""

    def __init__(self, dim, spec):
        super().__init__()
        self.patch, axes = spec.patch, len(spec.patch)
        points = math.prod(spec.patch)
        self.width = points * dim  # features of a token
        basis = torch.tensor(spec.points, dtype=torch.float64)  # (channels * points, D)
        change = torch.tensor(spec.change or (1.0,) * spec.width, dtype=torch.float64)
        typical = (basis * change).square().sum(1).mean().sqrt()  # change of a point in a step
        inverse = torch.linalg.pinv(basis) * (typical / change.clamp(min=1e-9)[:, None])
        self.register_buffer("basis", basis.float(), persistent=False)
        self.register_buffer("inverse", inverse.float(), persistent=False)

        conv, channels = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1], len(basis) // points
        same = {"kernel_size": 3, "padding": 1,
                "padding_mode": "circular" if spec.periodic else "replicate"}
        self.inp = conv(channels, dim, **same)
        self.hidden = nn.ModuleDict({  # whose matrices are Muon's
            "down": ResBlock(conv, dim, same), "join": conv(2 * dim, dim, 1),
            "up": ResBlock(conv, dim, same)})
        self.limit = Limit(dim)
        self.out = conv(dim, channels, **same)
        for p in self.out.parameters():
            nn.init.zeros_(p)

    def down(self, z, tokens):
        """Latents (B, N, D) -> features (B, dim, *grid)"""
        u = from_patches(F.linear(z, self.basis), self.patch, tokens[-len(self.patch):])
        return self.hidden["down"](self.inp(u))

    def cut(self, f):
        """(B, dim, *grid) -> (B, N, dim * points of a token)"""
        return to_patches(f, self.patch)

    def up(self, y, f, tokens):
        """Features of tokens (B, N, dim * points), and those on the way down -> (B, N, D)"""
        y = from_patches(y, self.patch, tokens[-len(self.patch):])
        y = self.hidden["up"](self.hidden["join"](torch.cat([y, f], 1)))
        return F.linear(to_patches(self.out(F.gelu(self.limit(y))), self.patch), self.inverse)


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
