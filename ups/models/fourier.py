"""Mix the tokens of a grid by truncated Fourier series along each axis and a local convolution.

    analysis -> one matrix per wave number -> synthesis       (F-FNO, Tran et al. 2023)

all of them real matrix products, plus a star-shaped convolution over the nearest tokens, of each
channel by itself, and a matrix over the channels (a depthwise separable one, Chollet 2017).
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

SMALL = 256  # tokens of a square grid whose Fourier series are taken by one matrix


class FourierMixer(nn.Module):
    """Global mixing by truncated Fourier series along each axis, local mixing by a convolution that
    weighs the taps of each channel and then mixes the channels.

    With 0 `modes` there are no waves, and nothing is seen beyond kernel // 2 tokens in each block.
    """

    def __init__(self, dim, axes, modes, kernel):
        super().__init__()
        self.axes, self.reach = axes, kernel // 2
        taps = 1 + 2 * self.reach * len(axes)
        self.taps = nn.Parameter(torch.randn(taps * dim) / math.sqrt(taps))  # flat, so AdamW's
        self.local = nn.Parameter(torch.randn(dim, dim) / math.sqrt(dim))
        self.modes = nn.Parameter(torch.randn(modes, len(axes), dim, 2 * dim)
                                  / math.sqrt(2 * dim)) if modes else None

    def tables(self, tokens, periodic):
        """(analysis, synthesis) for each axis that has more than one token; on a small square grid
        one pair for both axes at once: half the launches, and those fill a GPU better.
        """
        if self.modes is None:
            return []
        kinds = [(n, circle) for n, circle in zip(tokens, periodic, strict=True) if n > 1]
        pairs = [fourier_basis(n, len(self.modes), circle) for n, circle in kinds]
        if len(kinds) == 2 and kinds[0] == kinds[1] and math.prod(tokens) <= SMALL:
            pairs = [_both_axes(pairs, len(self.modes))]
        return [table for pair in pairs for table in pair]

    def forward(self, x, grid):
        taps = [x]
        for axis in self.axes:
            taps += _neighbours(x, axis + 1, self.reach, grid.periodic[axis])
        weights = self.taps.to(x.dtype).view(-1, x.shape[-1]).unbind()
        near = x * weights[0]
        for tap, weight in zip(taps[1:], weights[1:], strict=True):
            near += tap * weight  # in place: each new tensor costs as much as the product
        y = F.linear(near, self.local)
        if self.modes is None:
            return y
        if len(grid.tables) == 2:
            return y + _waves(x.flatten(1, 3), 1, self.modes.flatten(0, 1),
                              *grid.tables).view(x.shape)
        for axis, weight, analysis, synthesis in zip(self.axes, self.modes.unbind(1),
                                                     grid.tables[::2], grid.tables[1::2],
                                                     strict=True):
            y += _waves(x, axis + 1, weight, analysis, synthesis)
        return y


def _waves(x, axis, weight, analysis, synthesis):
    """Tokens (B, .., n, .., dim) -> coefficients along an axis -> dim x 2 dim for each wave number
    -> tokens; the synthesis table combines real and imaginary products, so no complex number is
    ever formed. What lies before and behind the axis is batch and columns: x itself is not moved.
    """
    dim, before, n, waves = x.shape[-1], math.prod(x.shape[:axis]), x.shape[axis], len(weight)
    a = torch.matmul(analysis, x.reshape(before, n, -1))           # (before, waves k, after dim)
    a = a.view(before, waves, -1, dim).transpose(0, 1).flatten(1, 2)
    b = torch.bmm(a, weight)                                       # (waves, before k after, 2 dim)
    b = b.view(waves, before, len(analysis) // waves, -1, 2, dim).permute(1, 0, 2, 4, 3, 5)
    return torch.matmul(synthesis, b.reshape(before, synthesis.shape[1], -1)).view(x.shape)


def _both_axes(pairs, modes):
    """One (analysis, synthesis) over all tokens of a square grid, from one for each axis.

    Rows of the analysis are ordered by wave number, axis, cosine and sine, and the place along the
    other axis; the columns of the synthesis are those and, last, real and imaginary products.
    """
    n = len(pairs[0][1])
    place = torch.eye(n, dtype=torch.float64)
    whole = [[], []]
    for axis, (analysis, synthesis) in enumerate(pairs):
        for tables, table in zip(whole, (analysis, synthesis.T), strict=True):
            spread = torch.tensordot(table.reshape(modes, -1, n), place, dims=0)
            tables.append(spread.movedim(2, 3 + axis).flatten(3))
    analysis, synthesis = (torch.stack(tables, 1) for tables in whole)  # (modes, axes, .., n, N)
    synthesis = synthesis.unflatten(2, (-1, 2)).movedim(3, 4)
    return analysis.flatten(0, 3), synthesis.flatten(0, 4).T.contiguous()


def fourier_basis(n, modes, periodic):
    """Analysis (K, n) and synthesis (n, 2K) of an axis of n tokens, wave numbers 0 <= k < modes.

    Periodic: c = sum x cos, s = sum x sin with angle 2 pi k j / n, and each wave number is mixed by
    a complex matrix R + i I, which commutes with shifts: out = cos (cR - sI) + sin (sR + cI).
    Closed: the angle is pi k (j + 1/2) / n, x is analysed in cosines alone (the even extension),
    and out = cos cR + sin cI, so that odd terms such as a gradient can be expressed.
    """
    k = torch.arange(modes, dtype=torch.float64)
    j = torch.arange(n, dtype=torch.float64)[:, None]
    angle = 2 * math.pi / n * k * j if periodic else math.pi / n * k * (j + 0.5)
    last = n / 2 if periodic else n - 1
    single = (k == 0) | (k == n / 2) & periodic                    # waves without a partner
    norm = (2 - single.double()) / n * (k <= last)
    cos, sin = torch.cos(angle), torch.sin(angle)                  # (n, modes)
    if periodic:
        analysis = torch.stack([cos * norm, sin * norm], -1)
        synthesis = torch.stack([cos, sin, sin, -cos], -1)         # c (R, I), s (R, I)
    else:
        analysis, synthesis = (cos * norm)[..., None], torch.stack([cos, sin], -1)
    return analysis.flatten(1).T.contiguous(), synthesis.flatten(1)


def _neighbours(x, axis, reach, periodic):
    """The tokens at -reach .. reach from each along an axis, but for itself; beyond an end around
    the circle, if need be more than once, or the last token."""
    n, offsets = x.shape[axis], [o for o in range(-reach, reach + 1) if o]
    if periodic and (x.is_cuda or reach > n):
        # compiled, all become one kernel that only reads, and back alike
        return [x.roll(-o, axis) for o in offsets]
    if periodic:
        padded = torch.cat([x.narrow(axis, n - reach, reach), x, x.narrow(axis, 0, reach)], axis)
    else:
        sizes = [reach if a == axis else -1 for a in range(x.ndim)]
        first, last = x.narrow(axis, 0, 1), x.narrow(axis, n - 1, 1)
        padded = torch.cat([first.expand(sizes), x, last.expand(sizes)], axis)
    return [padded.narrow(axis, reach + o, n) for o in offsets]
