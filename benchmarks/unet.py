"""A U-Net (Ronneberger et al. 2015) over one or two axes with residual blocks, as a yardstick.

    x <- x + conv(gelu(limit(conv(gelu(limit(x))))))      at each of `levels` + 1 resolutions

Every level halves the grid and doubles the channels; convolutions reach over the border around the
circle or by repeating the border values. Amplitudes are bounded and not normalised, as in our
operator: a group norm made the errors of roll-outs half as large again.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ups.config import check
from ups.models.layers import bounded


@dataclass(frozen=True)
class UNetConfig:
    width: int = 48    # channels at full resolution
    levels: int = 3    # how often the grid is halved
    depth: int = 1     # residual blocks per resolution, on the way down and on the way up

    def __post_init__(self):
        check(self, width=(1, math.inf), levels=(0, 8), depth=(1, math.inf))


class UNet(nn.Module):
    """(B, inputs, *grid) -> (B, outputs, *grid), zero at the start; any grid."""

    def __init__(self, config, inputs, outputs, grid, periodic):
        super().__init__()
        c, conv = config, (Conv1d, Conv2d)[len(grid) - 1]
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
            x = doubled(x)[:, :, *(slice(n) for n in skips[i].shape[2:])]
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
