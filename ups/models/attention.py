"""Attention over the tokens of a grid, whole or in windows.

    RotaryAttention   over all tokens (Su et al. 2021; here the wave numbers are whole)
    WindowAttention   in (shifted) windows, with a bias of log-spaced relative positions (Liu et al.
                      2022), each head reading its own channels only
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn


class RotaryAttention(nn.Module):
    """Attention over all tokens; positions enter as rotations of queries and keys."""

    def __init__(self, dim, axes, heads, highest):
        super().__init__()
        self.axes, self.heads, self.highest = axes, heads, highest
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.scale = nn.Parameter(torch.ones(2, dim // heads))

    def tables(self, tokens, periodic):
        """cos, sin (N, head_dim / 2). The wave numbers are whole, so that on a circle a shift of
        all tokens changes no angle between two of them; closed axes span half a turn."""
        half = self.scale.shape[-1] // 2
        pairs = half // len(self.axes)
        k = torch.logspace(0, math.log2(self.highest), pairs, 2, dtype=torch.float64).round()
        angles = []
        for axis in self.axes:
            turn = (2 if periodic[axis] else 1) * math.pi / tokens[axis]
            shape = [-1 if a == axis else 1 for a in range(3)]
            j = torch.arange(tokens[axis], dtype=torch.float64).view(shape)
            angles.append((turn * j[..., None] * k).expand(*tokens, pairs).reshape(-1, pairs))
        angle = F.pad(torch.cat(angles, -1), (0, half - pairs * len(self.axes)))
        return [torch.cos(angle), torch.sin(angle)]

    def forward(self, x, grid):
        cos, sin = grid.tables
        qkv = self.qkv(x.flatten(1, 3)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                        # (B, heads, N, d) each
        q, k = (_rotate(_rms(t) * s, cos, sin) for t, s in zip((q, k), self.scale, strict=True))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.out(y.transpose(1, 2).flatten(2)).view(x.shape)


def _rms(x):
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class WindowAttention(nn.Module):
    """Attention inside windows of the grid, shifted by half a window in every second block."""

    def __init__(self, dim, heads, window, shifted):
        super().__init__()
        head_dim = dim // heads
        self.heads, self.window, self.shifted = heads, window, shifted
        self.qkv = nn.Parameter(torch.randn(head_dim, heads, 3 * head_dim) / math.sqrt(head_dim))
        self.scale = nn.Parameter(torch.ones(2, head_dim))
        self.bias = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, heads, bias=False))
        self.out = nn.Linear(dim, dim, bias=False)

    def layout(self, tokens, shifted):
        """Along each axis: tokens of a window, length padded to whole windows, shift."""
        sizes = [min(self.window, n) for n in tokens]
        padded = [-(-n // w) * w for n, w in zip(tokens, sizes, strict=True)]
        return sizes, padded, [w // 2 * (shifted and p > w)
                               for w, p in zip(sizes, padded, strict=True)]

    def tables(self, tokens, periodic):
        """Log-spaced offsets (W, W, 3) inside a window, and the masks (windows, W, W), plain and
        shifted, that keep apart what only padding or a shift has brought together."""
        masks = []
        for shifted in (False, True):
            sizes, padded, shifts = self.layout(tokens, shifted)
            label = torch.zeros(1, 1, 1)
            for axis, (n, p, shift) in enumerate(zip(tokens, padded, shifts, strict=True)):
                at = torch.arange(p).roll(-shift)
                part = 2 * (at >= n) + (at < shift) * (not periodic[axis] or p > n)
                label = 3 * label + part.view([-1 if a == axis else 1 for a in range(3)])
            label = _windows(label.expand(padded)[None, ..., None], sizes)[0]  # (windows, W, 1)
            masks.append(torch.where(label == label.mT, 0.0, -math.inf))
        inside = torch.cartesian_prod(*[torch.arange(w) for w in sizes]).double()
        offsets = inside[:, None] - inside
        return [offsets.sign() * torch.log2(1 + offsets.abs()), *masks]

    def forward(self, x, grid):
        tokens = x.shape[1:4]
        sizes, padded, shift = self.layout(tokens, self.shifted)
        ends = [p - n for n, p in zip(tokens, padded, strict=True)]
        y = F.pad(x, (0, 0, 0, ends[2], 0, ends[1], 0, ends[0])) if any(ends) else x
        y = y.roll([-s for s in shift], (1, 2, 3)) if any(shift) else y
        y = _windows(y, sizes).unflatten(-1, (self.heads, -1))      # (B, windows, W, heads, d)
        q, k, v = torch.einsum("bwnhi,iho->bwhno", y, self.qkv).flatten(1, 2).chunk(3, dim=-1)
        q, k = (_rms(t) * s for t, s in zip((q, k), self.scale, strict=True))
        mask = self.bias(grid.tables[0]).permute(2, 0, 1) + grid.tables[1 + self.shifted][:, None]
        mask = mask.flatten(0, 1)[None].to(v.dtype)                 # (1, windows * heads, W, W)
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, mask)
        y = self.out(y.unflatten(1, (-1, self.heads)).transpose(2, 3).flatten(3))
        counts = [p // w for p, w in zip(padded, sizes, strict=True)]
        y = y.reshape(len(x), *counts, *sizes, -1).permute(0, 1, 4, 2, 5, 3, 6, 7)
        y = y.reshape(len(x), *padded, -1)
        y = y.roll(shift, (1, 2, 3)) if any(shift) else y
        return y[:, :tokens[0], :tokens[1], :tokens[2]]


def _windows(x, sizes):
    """(B, X, Y, Z, d) -> (B, windows, tokens of a window, d)"""
    parts = itertools.chain(*[(n // w, w) for n, w in zip(x.shape[1:4], sizes, strict=True)])
    x = x.reshape(len(x), *parts, x.shape[-1]).permute(0, 1, 3, 5, 2, 4, 6, 7)
    return x.flatten(4, 6).flatten(1, 3)

