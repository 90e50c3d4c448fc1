"""Blocks over a token grid.

Every body is a chain of `Block`s, x (B, X, Y, Z, dim) with unit axes where the problem has fewer:

    x <- x + gate * mixer(norm(x) * scale + shift)        scale (1 at the start), shift, gate: from
    x <- x + gate * mlp(norm(x) * scale + shift)          the body (Peebles & Xie 2023, adaLN-zero)

Amplitudes are what a time step is about, and a layer norm takes them away: errors of roll-outs are
up to twice as large with it. Without anything, the products in the MLP let some roll-outs grow
without limit. So by default `norm` is nothing, mixers are linear, and the products are `bounded`.
A steady field is better answered with a layer norm.

A mixer reads a `Grid`: the boundary and constant tables that depend on the token grid alone and are
made once, outside the blocks. Mixers: ups/models/fourier.py and ups/models/attention.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Grid(NamedTuple):
    """What a mixer must know of the token grid beside the tokens themselves."""

    periodic: tuple[bool, bool, bool]
    tables: tuple[torch.Tensor, ...]
    task: int = 0


class Block(nn.Module):
    """One residual block; with gates of zero it is the identity."""

    recompute = False  # keep only the input for the backward pass, and compute the rest again
    apart = False      # compiled by itself: `compiled`

    def __init__(self, mixer, mlp, layer_norm):
        super().__init__()
        self.mixer, self.mlp, self.layer = mixer, mlp, layer_norm

    def forward(self, x, modulation, grid):
        """x (B, X, Y, Z, dim), modulation: six of (B, 1, 1, 1, dim) -> (B, X, Y, Z, dim)"""
        if self.recompute and torch.is_grad_enabled():  # inside the block, for FSDP2 wraps it
            return checkpoint(self._both, x, modulation, grid, use_reentrant=False,
                              preserve_rng_state=False)
        return self._both(x, modulation, grid)

    def _both(self, x, modulation, grid):
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        y = autocast(torch.addcmul(shift, self.norm(x), scale))
        x = torch.addcmul(x, gate, self.mixer(y, grid))
        y = autocast(torch.addcmul(mlp_shift, self.norm(x), mlp_scale))
        return torch.addcmul(x, mlp_gate, self.mlp(y, grid))

    def norm(self, x):
        return F.layer_norm(x, x.shape[-1:]) if self.layer else x


def compiled(model):
    """The model, compiled in place: block by block where all of it would take many minutes."""
    for part in [m for m in model.modules() if getattr(m, "apart", False)] or [model]:
        part.compile(dynamic=False)
    return model


def autocast(x):
    """x as autocast's products want it: cast once, and read by all."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class GatedMLP(nn.Module):
    """out(silu(a) * b): products of features, which quadratic terms of a PDE are made of."""

    def __init__(self, dim, hidden, bound):
        super().__init__()
        self.bound = bound
        self.inp = nn.Linear(dim, 2 * hidden)
        self.out = nn.Linear(hidden, dim)

    def forward(self, x, grid=None):
        a, b = self.inp(x).chunk(2, dim=-1)
        y = F.silu(a) * b
        return self.out(bounded(y) if self.bound else y)


def bounded(x, most=4.0, axis=-1):
    """Nearly x where its root mean square over the channels is small; `most` is the limit of it."""
    return x * torch.rsqrt(1 + x.square().mean(axis, keepdim=True) / most**2)


class PerTask(nn.ModuleList):
    """A layer for each task: a Fourier mixer, because grids and speeds differ, or an MLP."""

    def forward(self, x, grid):
        return self[grid.task](x, grid)
