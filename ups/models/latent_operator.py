"""The operator: one time step of the latent tokens, z1 = z0 + scale * update(z0, dt, cond).

The last layer of the update starts at zero and nothing follows it, so that the operator starts as
the identity and "no change" can always be expressed. `dt`, the PDE's named parameters, the boundary
and the task become one vector c that modulates every block of the body (ups/models/body.py).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.body import TokenBody

WHITENING = 0.5  # 1: latent channels go in alike; 0: as they count in the field


@dataclass(frozen=True)
class TaskSpec:
    name: str
    tokens: tuple[int, int, int]  # token grid, leading ones where the problem has fewer axes
    width: int                    # D of this task's codec
    periodic: tuple[bool, bool, bool]  # of each axis of `tokens`; leading ones are
    params: tuple[str, ...] = ()  # names of the PDE parameters, in the order of `cond`
    inhomogeneous: tuple[int, ...] = ()  # periodic axes along which the equation varies
    conserved_directions: tuple[tuple[float, ...], ...] = ()  # w (D,): the mean of w . z is fixed
    change: tuple = ()            # (D,) root mean square of z1 - z0, or one for each of `dts`
    dts: tuple[float, ...] = ()   # sizes of the steps that are learned; empty: any
    weight: tuple[float, ...] = ()  # (D,) what a channel counts in the field; empty: ones
    inputs: int = 0               # E, values of a token of the channels that are given
    history: int = 1              # frames that the operator sees
    steady: bool = False          # whether z1 answers the inputs, and there is no time


class LatentOperator(nn.Module):
    """z1_hat = z0 + scale * update; channels beyond the task's own width are passed on unchanged.

    The scale is the typical change in a step of this dt, so that one learning rate fits slow and
    fast tasks, and of several tasks or strides in one model none drowns the others. Conserved means
    are kept exactly: half of the error of a long roll-out of Burgers' equation was the drift of its
    mean. Latents go in half whitened: the last components, made as large as the first, have the
    longest tails, at a front of thirty deviations, and drown what is smooth.
    """

    def __init__(self, config, tasks):
        super().__init__()
        self.tasks = tuple(tasks)
        self.width = max(task.width for task in self.tasks)
        self.history = self.tasks[0].history
        self.body = TokenBody(config, self.tasks, inputs=self.history * self.width,
                              outputs=self.width, scalars=1)
        self.conserve = ConserveMean(self.tasks)
        for index, task in enumerate(self.tasks):
            ones = (1.0,) * task.width
            root = torch.tensor(task.weight or ones, dtype=torch.float64)
            root = root ** ((1 - WHITENING) / 2)
            scale = F.pad(root / root.square().mean().sqrt(), (0, self.width - task.width))
            self.register_buffer(f"input_scale{index}", scale.float(), persistent=False)
            change = torch.tensor(task.change or ones).view(-1, task.width)
            self.register_buffer(f"scale{index}", change, persistent=False)  # (strides, D)
            log_dts = torch.tensor(task.dts).log10()
            self.register_buffer(f"log_dts{index}", log_dts, persistent=False)

    def forward(self, z0, dt, cond, task=0, inputs=None, modulation=None, added=None):
        """z0 (B, N, D), dt (B,), cond (B, P), inputs (B, N, E) at z0's time -> z1_hat (B, N, D)

        With a history of H > 1 frames z0 is (B, H, N, D), the last one of them now.
        `modulation`: what `modulate` says of dt and cond, where a roll-out has asked it once.
        `added` (B, N, dim) goes to what the first layer says.
        """
        width = self.tasks[task].width
        x, log_dt = z0 * self.get_buffer(f"input_scale{task}"), torch.log10(dt)[:, None]
        if self.history > 1:
            x, z0 = x.transpose(1, 2).flatten(2), z0[:, -1]                     # (B, N, H * D)
        update = self.body(x, log_dt, cond, task, inputs, modulation, added)[..., :width]
        scale = self.get_buffer(f"scale{task}")
        if len(scale) > 1:
            nearest = (log_dt - self.get_buffer(f"log_dts{task}")).abs().argmin(1)
            scale = scale[nearest][:, None]                                     # (B, 1, D)
        change = self.conserve(scale * update, task)
        return z0 + F.pad(change, (0, self.width - width))

    def modulate(self, dt, cond, task=0):
        """What depends on dt and cond alone: the same in every step of a roll-out."""
        return self.body.modulate(torch.log10(dt)[:, None], cond, task)

    def take(self, other, origin):
        """The weights of `other`: for task i those of its task origin[i]."""
        self.body.take(other.body, origin)

    @property
    def hidden(self):
        """The layers whose matrices are Muon's."""
        return self.body.hidden


def latest(z):
    """The state now (B, N, D): of a history (B, H, N, D) the last frame."""
    return z if z.ndim == 3 else z[:, -1]


class ConserveMean(nn.Module):
    """Take out of a change of the latents (B, N, D) what would move a conserved mean."""

    def __init__(self, tasks):
        super().__init__()
        self.active = [bool(spec.conserved_directions) for spec in tasks]
        for index, spec in enumerate(tasks):
            directions = torch.tensor(spec.conserved_directions).reshape(-1, spec.width)
            q = torch.linalg.qr(directions.T)[0]
            self.register_buffer(f"onto{index}", q @ q.T, persistent=False)  # (D, D)

    def forward(self, change, task):
        if not self.active[task]:
            return change
        moved = change.mean(1, keepdim=True)[..., None] * self.get_buffer(f"onto{task}")
        return change - moved.sum(-2)
