"""The operator: one time step of the latent tokens, z1 = z0 + scale * update(z0, dt, cond).

The last layer of the update starts at zero and nothing follows it, so that the operator starts as
the identity and "no change" can always be expressed. `dt`, the PDE's named parameters, the boundary
and the task become one vector c that modulates every block of the body (ups/models/body.py).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ups.config import check, each
from ups.models.body import TokenBody
from ups.models.points import Points

BODIES = ("fourier", "plain", "pdet")
NORMS = ("bounded", "layer")


@dataclass(frozen=True)
class OperatorConfig:
    body: str = "fourier"   # fourier, plain or pdet
    dim: int = 64           # width of the residual stream
    depth: int = 6          # blocks in all
    mlp_ratio: float = 2.0  # hidden width of the MLP / dim
    own: int = 2            # several tasks: every n-th block has an MLP for each; 0: all share one
    norm: str = "bounded"   # bounded: products in the MLP; layer: norm of every block's input
    modes: tuple[int, ...] = (8,)   # fourier: waves of an axis, at most all (of each task); 0: none
    kernel: tuple[int, ...] = (5,)  # fourier: tokens of a convolution (of each task); 3 suits 2-D
    heads: int = 4          # plain, pdet: attention heads at full resolution
    window: int = 8         # pdet: tokens of a window along each axis
    levels: int = 1         # pdet: how often tokens are merged

    def __post_init__(self):
        if self.body not in BODIES:
            raise ValueError(f"body {self.body!r} is not one of {', '.join(BODIES)}.")
        if self.norm not in NORMS:
            raise ValueError(f"norm {self.norm!r} is not one of {', '.join(NORMS)}.")
        for name in ("modes", "kernel"):  # a number stands for all tasks
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if hasattr(value, "__iter__") else (value,))
        counts = dict.fromkeys(("dim", "depth", "kernel", "heads", "window"), (1, math.inf))
        check(self, mlp_ratio=(0.1, math.inf), own=(0, math.inf), modes=(0, math.inf),
              levels=(0, math.inf), **counts)
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 * heads = {2 * self.heads}.")
        if self.body == "pdet" and self.depth < 2 * self.levels + 1:
            raise ValueError(f"depth {self.depth} must be at least {2 * self.levels + 1}: pdet has "
                             f"{self.levels} levels.")
        if any(kernel % 2 == 0 for kernel in self.kernel):
            raise ValueError(f"kernel {' '.join(map(str, self.kernel))} must be odd.")

    def of_tasks(self, count):
        """(modes, kernel) for each of `count` tasks."""
        return list(zip(each("--model.modes", self.modes, count),
                        each("--model.kernel", self.kernel, count), strict=True))


@dataclass(frozen=True)
class TaskSpec:
    name: str
    tokens: tuple[int, int, int]  # token grid, leading ones where the problem has fewer axes
    width: int                    # D of this task's codec
    periodic: bool
    params: tuple[str, ...] = ()  # names of the PDE parameters, in the order of `cond`
    forced: tuple[int, ...] = ()  # axes of `tokens` along which the equation depends on the place
    kept: tuple[tuple[float, ...], ...] = ()  # w (D,) for which the mean of w . z never changes
    change: tuple[float, ...] = ()  # (D,) root mean square of z1 - z0; empty: ones
    seen: tuple[float, ...] = ()    # (D,) factors of the latents that go in; empty: ones
    points: tuple[tuple[float, ...], ...] = ()  # (channels * points of a token, D): points @ z
    patch: tuple[int, ...] = ()     # points of a token along each axis


class LatentOperator(nn.Module):
    """z1_hat = z0 + scale * update; channels beyond the task's own width are passed on unchanged.

    The scale is the typical change in a step, so that one learning rate fits slow and fast tasks,
    and of several tasks in one model none drowns the others. Conserved means are kept exactly: half
    of the error of a long roll-out of Burgers' equation was the drift of its mean. With `fine`
    channels there are convolutions on the points of the tokens around the body.
    """

    def __init__(self, config, tasks, fine=0):
        super().__init__()
        self.tasks = tuple(tasks)
        self.width = max(task.width for task in self.tasks)
        self.points = nn.ModuleList(Points(fine, task) for task in self.tasks if fine)
        self.features = max([own.width for own in self.points], default=0)
        width = self.width + self.features
        self.body = TokenBody(config, self.tasks, inputs=width, outputs=width, scalars=1,
                              exact=not fine)  # with `fine`, the latents' own way is by the points
        for layer in self.body.out if fine else []:  # only what is added to the latents is zero
            nn.init.normal_(layer.weight[self.width:], std=config.dim**-0.5)
        self.keep = Keep(self.tasks)
        for index, task in enumerate(self.tasks):
            scale = torch.tensor(task.change or (1.0,) * task.width)
            self.register_buffer(f"scale{index}", scale, persistent=False)
            seen = torch.tensor(task.seen or (1.0,) * task.width)
            seen = F.pad(seen, (0, self.width - task.width))
            # saved, so that a run that began without it is not resumed with it
            self.register_buffer(f"seen{index}", seen, persistent=bool(task.seen))

    def forward(self, z0, dt, cond, task=0):
        """z0 (B, N, D), dt (B,), cond (B, P) -> z1_hat (B, N, D)"""
        width, seen = self.tasks[task].width, z0 * self.get_buffer(f"seen{task}")
        log_dt = torch.log10(dt)[:, None]
        if not self.points:
            update = self.body(seen, log_dt, cond, task)[..., :width]
        else:
            own = self.points[task]
            f = own.down(z0[..., :width])
            seen = torch.cat([seen, F.pad(own.cut(f), (0, self.features - own.width))], -1)
            update, y = self.body(seen, log_dt, cond, task).split([self.width, self.features], -1)
            update = update[..., :width] + own.up(y[..., :own.width], f)
        change = self.keep(self.get_buffer(f"scale{task}") * update, task)
        return z0 + F.pad(change, (0, self.width - width))

    @property
    def hidden(self):
        """The layers whose matrices are Muon's."""
        return nn.ModuleList([self.body.hidden, *[points.hidden for points in self.points]])


class Keep(nn.Module):
    """Take out of a change of the latents (B, N, D) what would move a conserved mean."""

    def __init__(self, tasks):
        super().__init__()
        self.active = [bool(spec.kept) for spec in tasks]
        for index, spec in enumerate(tasks):
            q = torch.linalg.qr(torch.tensor(spec.kept).reshape(-1, spec.width).T)[0]
            self.register_buffer(f"onto{index}", q @ q.T, persistent=False)  # (D, D)

    def forward(self, change, task):
        if not self.active[task]:
            return change
        moved = change.mean(1, keepdim=True)[..., None] * self.get_buffer(f"onto{task}")
        return change - moved.sum(-2)  # no product of matrices: those may be rounded to TF32
