"""A U-Net (Ronneberger et al. 2015) over one or two axes with residual blocks, as a yardstick.

    x <- x + conv(gelu(norm(conv(gelu(norm(x))))))        at each of `levels` + 1 resolutions

Every level halves the grid and doubles the channels; convolutions reach over the border around the
circle or by repeating the border values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class UNetConfig:
    width: int = 48    # channels at full resolution
    levels: int = 3    # how often the grid is halved
    depth: int = 1     # residual blocks per resolution, on the way down and on the way up
    kernel: int = 3
    groups: int = 8    # of the normalisation


class UNet(nn.Module):
    """(B, inputs, *grid) -> (B, outputs, *grid), zero at the start; any grid."""

    def __init__(self, config, inputs, outputs, grid, periodic):
        super().__init__()
        c, mode, axes = config, "circular" if periodic else "replicate", len(grid)
        conv = (nn.Conv1d, nn.Conv2d)[axes - 1]
        widths = [c.width << level for level in range(c.levels + 1)]

        def blocks(width):
            return nn.Sequential(*[ResBlock(conv, width, c, mode) for _ in range(c.depth)])

        self.inp = conv(inputs, c.width, c.kernel, padding=c.kernel // 2, padding_mode=mode)
        self.down = nn.ModuleList(blocks(width) for width in widths[:-1])
        self.merge = nn.ModuleList(conv(width, 2 * width, 3, 2, padding=1, padding_mode=mode)
                                   for width in widths[:-1])
        self.bottom = blocks(widths[-1])
        self.split = nn.ModuleList(conv(2 * width, width, 3, padding=1, padding_mode=mode)
                                   for width in widths[:-1])
        self.join = nn.ModuleList(conv(2 * width, width, 1) for width in widths[:-1])
        self.up = nn.ModuleList(blocks(width) for width in widths[:-1])
        self.norm = nn.GroupNorm(c.groups, c.width)
        self.out = conv(c.width, outputs, c.kernel, padding=c.kernel // 2, padding_mode=mode)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        x, skips = self.inp(x), []
        for blocks, merge in zip(self.down, self.merge, strict=True):
            skips.append(blocks(x))
            x = merge(skips[-1])
        x = self.bottom(x)
        for i in reversed(range(len(skips))):
            x = self.split[i](F.interpolate(x, size=skips[i].shape[2:]))
            x = self.up[i](self.join[i](torch.cat([x, skips[i]], 1)))
        return self.out(F.gelu(self.norm(x)))


class ResBlock(nn.Module):
    def __init__(self, conv, width, config, mode):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(config.groups, width) for _ in range(2))
        self.convs = nn.ModuleList(conv(width, width, config.kernel, padding=config.kernel // 2,
                                        padding_mode=mode) for _ in range(2))

    def forward(self, x):
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.gelu(norm(y)))
        return x + y
