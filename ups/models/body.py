"""The body of every model over tokens: first layer, blocks modulated by the condition, last layer.

    fourier   blocks that mix by local convolution and (but for `modes` 0) truncated Fourier series
    plain     blocks of full attention with rotary positions
    pdet      blocks of attention in windows, every second one shifted by half a window

Fourier and plain commute with any circular shift of a periodic grid by whole tokens; pdet with
shifts by multiples of the window.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ups.models import recipe
from ups.models.attention import RotaryAttention, WindowAttention
from ups.models.fourier import FourierMixer
from ups.models.layers import Block, GatedMLP, Grid, PerTask, bounded
from ups.models.precision import linear

BODIES = ("fourier", "plain", "pdet")
PRECISIONS = ("float32", "bfloat16")
MLP_RATIO = 2  # hidden width of an MLP / dim
PER_TASK = 2  # of several tasks, every n-th block has an MLP for each


@dataclass(frozen=True)
class BodyConfig:
    body: str = "fourier"   # fourier, plain (full attention) or pdet (attention in windows)
    dim: int = 64           # width of the residual stream
    depth: int = 6          # blocks
    modes: int = 8          # fourier: waves of an axis, at most all; 0: none
    kernel: int = 0         # fourier: tokens of a convolution, odd; 0: 5 in 1-D, else 3
    heads: int = 4          # plain, pdet: attention heads
    window: int = 8         # pdet: tokens of a window along each axis
    precision: str = "float32"  # of products in the blocks in training: float32 or bfloat16

    def __post_init__(self):
        known = {"body": BODIES, "precision": PRECISIONS}
        least = {"dim": 1, "depth": 1, "heads": 1, "window": 1, "modes": 0, "kernel": 0}
        for name, value in vars(self).items():
            if value not in known.get(name, [value]):
                raise ValueError(f"{name} {value!r} is not one of {', '.join(known[name])}.")
            if name in least and value < least[name]:
                raise ValueError(f"{name} must be at least {least[name]}, not {value}.")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 * heads = {2 * self.heads}.")
        if self.kernel and self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} must be odd.")


class TokenBody(nn.Module):
    """(B, N, inputs) -> (B, N, outputs), zero at the start, conditioned on `scalars` and `cond`.

    Tables of the tasks' grids are buffers (not saved: they follow from the config). Parameters with
    the same name share one slot of the condition.
    """

    def __init__(self, config, tasks, inputs, outputs, scalars):
        super().__init__()
        self.config, self.tasks, self.scalars = config, tuple(tasks), scalars
        self.axes = [a for a in range(3)  # of the token grid, that some task has
                     if a == 2 or any(task.tokens[a] > 1 for task in self.tasks)]
        self.rounded = len(self.axes) > 1  # products in training: ups/models/precision.py
        self.names = sorted({name for task in self.tasks for name in task.params})

        dim = config.dim
        # the first and the last layer are each task's own, as its latents are
        self.inp = nn.ModuleList(nn.Linear(inputs + task.inputs + 4 * len(self.axes), dim)
                                 for task in self.tasks)
        self.out = nn.ModuleList(nn.Linear(dim, outputs) for _ in self.tasks)
        self.task = nn.ParameterList(0.1 * torch.randn(dim) for _ in self.tasks)
        self.condition = nn.Sequential(nn.Linear(scalars + len(self.names) + 1, dim), nn.SiLU(),
                                       nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(self._block(dim, i) for i in range(config.depth))
        for block in self.blocks:
            block.apart = len(self.axes) == 3 or dim >= recipe.APART
        self.modulation = nn.ModuleList(nn.Linear(dim, 6 * dim) for _ in self.blocks)
        for p in (*self.out.parameters(), *self.modulation.parameters()):
            nn.init.zeros_(p)

        self.low = None    # what the blocks are computed in, if not as the rest: `lower`
        self.tables = []  # the names of each task's buffers
        for index, task in enumerate(self.tasks):
            mixer = self.blocks[0].mixer
            mixer = mixer[index] if isinstance(mixer, PerTask) else mixer
            tables = [self._places(task), *mixer.tables(task.tokens, task.periodic)]
            self.tables.append([f"grid{index}_{j}" for j in range(len(tables))])
            for name, table in zip(self.tables[-1], tables, strict=True):
                self.register_buffer(name, table.float(), persistent=False)

    def _block(self, dim, i):
        c, layer = self.config, any(task.steady for task in self.tasks)
        if c.body == "fourier":
            mixer = PerTask(self._fourier_mixer(task) for task in self.tasks)
        elif c.body == "plain":
            highest = max(2, *(n for task in self.tasks for n in task.tokens)) // 2
            mixer = RotaryAttention(dim, self.axes, c.heads, highest)
        else:
            mixer = WindowAttention(dim, c.heads, c.window, shifted=i % 2 == 1)

        def mlp():
            return GatedMLP(dim, MLP_RATIO * dim, bound=not layer)

        per_task = len(self.tasks) > 1 and (i + 1) % PER_TASK == 0
        return Block(mixer, PerTask(mlp() for _ in self.tasks) if per_task else mlp(), layer)

    def _fourier_mixer(self, task):
        c, axes = self.config, [a for a in range(3) if task.tokens[a] > 1]
        waves = min(c.modes, recipe.all_waves(task.tokens, task.periodic))
        return FourierMixer(c.dim, axes, waves, c.kernel or recipe.kernel(len(axes)))

    @property
    def hidden(self):
        """The layers between the first and the last one, whose matrices are Muon's."""
        return nn.ModuleList([self.blocks, self.modulation])

    def forward(self, x, scalars, cond, task=0, inputs=None, modulation=None, added=None):
        """x (B, N, inputs), scalars (B, S), cond (B, P), input tokens (B, N, E) of a task that has
        them, what `modulate` says where it is known, and what is added to the first layer's
        result (B, N, dim) -> (B, N, outputs)"""
        spec = self.tasks[task]
        if spec.inputs:
            if inputs is None or inputs.shape[-1] != spec.inputs:
                raise ValueError(f"{spec.name} is given input tokens of {spec.inputs} values.")
            x = torch.cat([x, inputs], -1)
        if x.shape[1] != math.prod(spec.tokens):
            raise ValueError(f"{x.shape[1]} tokens do not fill a token grid of {spec.tokens}.")
        places, *tables = [getattr(self, name) for name in self.tables[task]]
        grid = Grid(spec.periodic, tuple(tables), task)

        x = x.unflatten(1, spec.tokens)                              # (B, X, Y, Z, inputs)
        x = self._exact(self.inp[task], torch.cat([x, places.expand(len(x), *places.shape)], -1))
        if added is not None:
            x = x + added.unflatten(1, spec.tokens)
        x = x.to(self.low) if self.low else x
        modulation = modulation or self.modulate(scalars, cond, task)
        with self._precision(x):
            for block, m in zip(self.blocks, modulation, strict=True):
                x = block(x, m, grid)
        x = x.to(self.out[task].weight.dtype) if self.low else x
        return self._exact(self.out[task], x).flatten(1, 3)

    def _exact(self, layer, x):
        """layer(x), whose rounding would count"""
        return linear(layer, x) if self.rounded else layer(x)

    def _precision(self, x):
        """Where products are bfloat16, while the residual stream stays as it is: in training."""
        if self.config.precision == "float32" or not (self.training and torch.is_grad_enabled()):
            return contextlib.nullcontext()
        return torch.autocast(x.device.type, torch.bfloat16)

    def lower(self, dtype):
        """Compute the blocks in a dtype: for inference."""
        self.low = dtype
        self.blocks.to(dtype)
        for name in [name for names in self.tables for name in names[1:]]:
            setattr(self, name, getattr(self, name).to(dtype))

    def modulate(self, scalars, cond, task=0):
        """Shift, 1 + scale and gate (B, 1, 1, 1, dim) of both halves of each block, all in one
        product: fewer launches. A roll-out needs it once, for all its steps."""
        spec = self.tasks[task]
        closed = torch.full_like(scalars[:, 0], float(not all(spec.periodic)))
        slots = [cond[:, spec.params.index(name)] if name in spec.params
                 else torch.zeros_like(closed) for name in self.names]
        features = torch.stack([*scalars.unbind(-1), closed, *slots], -1)
        # bounded: it grew twentyfold in long runs, and every step on the gates is in its units
        c = bounded(self.condition(features) + self.task[task], 1.0)
        weight = torch.cat([layer.weight for layer in self.modulation])
        bias = torch.cat([layer.bias for layer in self.modulation])
        m = F.linear(F.silu(c), weight, bias)[:, None, None, None].chunk(6 * len(self.blocks), -1)
        m = [1 + part if k % 3 == 1 else part for k, part in enumerate(m)]
        m = [part.to(self.low) for part in m] if self.low else m
        return [m[k:k + 6] for k in range(0, len(m), 6)]

    @torch.no_grad()
    def take(self, other, origin):
        """The weights of `other`, a body of the same sizes: for task i those of its task origin[i].

        Columns and PDE parameters match by name, waves by number. What `other` has not is zero.
        """
        for own, known in ((self.modulation, other.modulation),
                           (self.condition[2], other.condition[2])):
            own.load_state_dict(known.state_dict())
        _copy(self.condition[0], other.condition[0], self._slots(), other._slots())
        for i, k in enumerate(origin):
            _copy(self.inp[i], other.inp[k], self._columns(i), other._columns(k))
            _copy(self.out[i], other.out[k])
            self.task[i].copy_(other.task[k])
            for a, b in zip(self.blocks, other.blocks, strict=True):
                for own, known in ((a.mixer, b.mixer), (a.mlp, b.mlp)):
                    _copy(own[i] if isinstance(own, PerTask) else own,
                          known[k] if isinstance(known, PerTask) else known)

    def _slots(self):
        """What the condition is made of, by name"""
        return [*range(self.scalars), "closed", *self.names]

    def _columns(self, task):
        """What the first layer of a task reads, by name"""
        places = [(axis, wave) for axis in self.axes for wave in range(4)]
        given = [f"input {k}" for k in range(self.tasks[task].inputs)]
        return [*range(self.inp[task].in_features - len(given) - len(places)), *given, *places]

    def _places(self, task):
        """Positions (X, Y, Z, 4 * axes): cos(pi k x) on closed axes; two waves along inhomogeneous
        circles; zero elsewhere, because a circle has no position."""
        k = torch.arange(1, 5, dtype=torch.float64)
        out = []
        for axis in self.axes:
            n = task.tokens[axis]
            x = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
            if task.periodic[axis]:
                angle = 2 * math.pi * x * k[:2]
                wave = torch.cat([angle.cos(), angle.sin()], -1) * (axis in task.inhomogeneous)
            else:
                wave = torch.cos(math.pi * x * k)
            shape = [-1 if a == axis else 1 for a in range(3)]
            out.append(wave.view(*shape, 4).expand(*task.tokens, 4))
        return torch.cat(out, -1)


def _copy(layer, other, names=None, known=None):
    """The weights of another layer: rows as far as both go, or columns of the same `names`."""
    for own, old in zip(layer.parameters(), other.parameters(), strict=True):
        if names and own.ndim == 2:
            at = [known.index(name) if name in known else -1 for name in names]
            old = F.pad(old, (0, 1))[:, at]  # -1: nothing known
        rows = min(len(own), len(old))
        own.zero_()[:rows] = old[:rows]
