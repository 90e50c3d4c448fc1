"""The body of every model over tokens: first layer, blocks modulated by the condition, last layer.

    fourier   blocks that mix by local convolution and (but for `modes` 0) truncated Fourier series
    plain     blocks of full attention with rotary positions
    pdet      a U of windowed-attention blocks: tokens merge in pairs along every axis, split again

Fourier and plain commute with any circular shift of a periodic grid by whole tokens; pdet with
shifts by multiples of 2**levels * window tokens, the period of its coarsest windows.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ups.config import check
from ups.models.attention import RotaryAttention, WindowAttention, merge, split
from ups.models.fourier import FourierMixer, all_waves
from ups.models.layers import Block, GatedMLP, Grid, PerTask, bounded

BODIES = ("fourier", "plain", "pdet")
NORMS = ("bounded", "layer")
PER_TASK = 2  # of several tasks, every n-th block has an MLP for each


@dataclass(frozen=True)
class BodyConfig:
    body: str = "fourier"   # fourier, plain (full attention) or pdet (attention in windows)
    dim: int = 64           # width of the residual stream
    depth: int = 6          # blocks in all
    mlp_ratio: float = 2.0  # hidden width of the MLP / dim
    norm: str = "bounded"   # bounded: products in the MLP; layer: norm of every block's input
    modes: int = 8          # fourier: waves of an axis, at most all; 0: none
    kernel: int = 5         # fourier: tokens of a convolution; 3 suits 2-D
    heads: int = 4          # plain, pdet: attention heads at full resolution
    window: int = 8         # pdet: tokens of a window along each axis
    levels: int = 1         # pdet: how often tokens are merged

    def __post_init__(self):
        if self.body not in BODIES:
            raise ValueError(f"body {self.body!r} is not one of {', '.join(BODIES)}.")
        if self.norm not in NORMS:
            raise ValueError(f"norm {self.norm!r} is not one of {', '.join(NORMS)}.")
        counts = dict.fromkeys(("dim", "depth", "kernel", "heads", "window"), (1, math.inf))
        check(self, mlp_ratio=(0.1, math.inf), modes=(0, math.inf), levels=(0, math.inf), **counts)
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 * heads = {2 * self.heads}.")
        if self.body == "pdet" and self.depth < 2 * self.levels + 1:
            raise ValueError(f"depth {self.depth} must be at least {2 * self.levels + 1}: pdet has "
                             f"{self.levels} levels.")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel} must be odd.")


class TokenBody(nn.Module):
    """(B, N, inputs) -> (B, N, outputs), zero at the start, conditioned on `scalars` and `cond`.

    Tables of the tasks' grids are buffers (not saved: they follow from the config). Parameters with
    the same name share one slot of the condition.
    """

    def __init__(self, config, tasks, inputs, outputs, scalars):
        super().__init__()
        self.config, self.tasks = config, tuple(tasks)
        self.axes = [a for a in range(3)  # of the token grid, that some task has
                     if a == 2 or any(task.tokens[a] > 1 for task in self.tasks)]
        self.names = sorted({name for task in self.tasks for name in task.params})

        dim = config.dim
        # the first and the last layer are each task's own, as its latents are
        self.inp = nn.ModuleList(nn.Linear(inputs + task.inputs + 4 * len(self.axes), dim)
                                 for task in self.tasks)
        self.out = nn.ModuleList(nn.Linear(dim, outputs) for _ in self.tasks)
        for p in self.out.parameters():
            nn.init.zeros_(p)
        self.task = nn.ParameterList(0.1 * torch.randn(dim) for _ in self.tasks)
        self.condition = nn.Sequential(nn.Linear(scalars + len(self.names) + 1, dim), nn.SiLU(),
                                       nn.Linear(dim, dim))

        # stages of blocks: one for fourier and plain; down, bottom and up for pdet
        levels = config.levels if config.body == "pdet" else 0
        stages = 2 * levels + 1
        self.levels = [min(s, stages - 1 - s) for s in range(stages)]
        inner = sorted(range(stages), key=lambda s: abs(s - levels))[: config.depth % stages]
        counts = [config.depth // stages + (s in inner) for s in range(stages)]
        index = itertools.count()
        self.stages = nn.ModuleList(
            nn.ModuleList(self._block(dim << level, next(index)) for _ in range(count))
            for level, count in zip(self.levels, counts, strict=True))
        self.modulation = nn.ModuleList(
            nn.Linear(dim, 6 * dim << level)
            for level, count in zip(self.levels, counts, strict=True) for _ in range(count))
        for p in self.modulation.parameters():
            nn.init.zeros_(p)
        self.merge = nn.ParameterList(
            torch.randn(dim << s + 1, 2, 2, 2, dim << s) / math.sqrt(dim << s + len(self.axes))
            for s in range(levels))
        self.split = nn.ParameterList(
            torch.randn(dim << s + 1, 2, 2, 2, dim << s) / math.sqrt(dim << s + 1)
            for s in range(levels))

        self.known = []  # for each task the names of its buffers, level by level
        for index in range(len(self.tasks)):
            tables = self._tables(index)
            self.known.append([[f"grid{index}_{i}_{j}" for j in range(len(row))]
                               for i, row in enumerate(tables)])
            for name, table in zip(sum(self.known[-1], []), sum(tables, []), strict=True):
                self.register_buffer(name, table.float(), persistent=False)

    def _block(self, dim, i):
        c = self.config
        if c.body == "fourier":
            mixer = PerTask(FourierMixer(dim, [a for a in range(3) if task.tokens[a] > 1],
                                     min(c.modes, all_waves(task.tokens, task.periodic)), c.kernel)
                        for task in self.tasks)
        elif c.body == "plain":
            highest = max(2, *(n for task in self.tasks for n in task.tokens)) // 2
            mixer = RotaryAttention(dim, self.axes, c.heads, highest)
        else:  # heads keep their width where the stream is wider
            mixer = WindowAttention(dim, c.heads * dim // c.dim, c.window, shifted=i % 2 == 1)

        def mlp():
            return GatedMLP(dim, int(dim * c.mlp_ratio), bound=c.norm == "bounded")

        per_task = len(self.tasks) > 1 and (i + 1) % PER_TASK == 0
        return Block(mixer, PerTask(mlp() for _ in self.tasks) if per_task else mlp(), c.norm)

    @property
    def hidden(self):
        """The layers between the first and the last one, whose matrices are Muon's."""
        return nn.ModuleList([self.stages, self.modulation])

    def forward(self, x, scalars, cond, task=0, inputs=None):
        """x (B, N, inputs), scalars (B, S), cond (B, P), input tokens (B, N, E) of a task that has
        them -> (B, N, outputs)"""
        spec = self.tasks[task]
        if spec.inputs:
            if inputs is None or inputs.shape[-1] != spec.inputs:
                raise ValueError(f"{spec.name} is given input tokens of {spec.inputs} values.")
            x = torch.cat([x, inputs], -1)
        if x.shape[1] != math.prod(spec.tokens):
            raise ValueError(f"{x.shape[1]} tokens do not fill a token grid of {spec.tokens}.")
        (places,), *tables = [[getattr(self, name) for name in row] for row in self.known[task]]
        grids = [Grid(spec.periodic, tuple(row), task) for row in tables]

        closed = torch.full_like(scalars[:, 0], float(not all(spec.periodic)))
        slots = [cond[:, spec.params.index(name)] if name in spec.params
                 else torch.zeros_like(closed) for name in self.names]
        features = torch.stack([*scalars.unbind(-1), closed, *slots], -1)
        # bounded: it grew twentyfold in long runs, and every step on the gates is in its units
        c = bounded(self.condition(features) + self.task[task], 1.0)
        modulations = iter(self._modulations(c))

        x = x.unflatten(1, spec.tokens)                              # (B, X, Y, Z, inputs)
        x = self.inp[task](torch.cat([x, places.expand(len(x), *places.shape)], -1))
        skips = []
        for s, (level, blocks) in enumerate(zip(self.levels, self.stages, strict=True)):
            if s and level > self.levels[s - 1]:
                skips.append(x)
                x = merge(x, self.merge[level - 1])
            elif s:
                skip = skips.pop()
                x = skip + split(x, self.split[level], skip.shape[1:4])
            for block in blocks:
                x = block(x, next(modulations), grids[level])
        return self.out[task](x).flatten(1, 3)

    def _modulations(self, c):
        """What each block is modulated by, (B, 6 dim), of all in one product: fewer launches."""
        weight = torch.cat([layer.weight for layer in self.modulation])
        bias = torch.cat([layer.bias for layer in self.modulation])
        sizes = [layer.out_features for layer in self.modulation]
        return F.linear(F.silu(c), weight, bias).split(sizes, -1)

    def _tables(self, task):
        """The positions, then for each level what its mixers need."""
        spec, tokens = self.tasks[task], self.tasks[task].tokens
        rows = [[self._places(tokens, spec.periodic, spec.inhomogeneous)]]
        for level in range(max(self.levels) + 1):
            mixer = self.stages[level][0].mixer
            mixer = mixer[task] if isinstance(mixer, PerTask) else mixer
            rows.append(mixer.tables(tokens, spec.periodic))
            tokens = tuple(-(-n // 2) for n in tokens)
        return rows

    def _places(self, tokens, periodic, inhomogeneous):
        """Positions (X, Y, Z, 4 * axes): cos(pi k x) on closed axes; two waves along inhomogeneous
        circles; zero elsewhere, because a circle has no position."""
        k = torch.arange(1, 5, dtype=torch.float64)
        out = []
        for axis in self.axes:
            x = (torch.arange(tokens[axis], dtype=torch.float64)[:, None] + 0.5) / tokens[axis]
            if periodic[axis]:
                angle = 2 * math.pi * x * k[:2]
                wave = torch.cat([angle.cos(), angle.sin()], -1) * (axis in inhomogeneous)
            else:
                wave = torch.cos(math.pi * x * k)
            shape = [-1 if a == axis else 1 for a in range(3)]
            out.append(wave.view(*shape, 4).expand(*tokens, 4))
        return torch.cat(out, -1)
