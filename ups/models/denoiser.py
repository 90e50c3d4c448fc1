"""The network inside a diffusion or consistency model of latent tokens.

A `TokenBody` reads the noisy tokens and what they are conditioned on, concatenated by channel:

    corrector   [noisy residual, z0, z1_hat]    channels = 3, models z1 - z1_hat
    steady      [noisy u-latent, a-latent]      channels = 2

and, as numbers that modulate every block, log10 dt, c_noise and the PDE's parameters. It starts as
zero, so that D(x; sigma) = c_skip x. Teacher and student are of this one class and may exchange
their weights.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.body import TokenBody


class Denoiser(nn.Module):
    """net(x, c_noise | context, dt, cond); channels beyond the task's own width are zero."""

    def __init__(self, config, tasks, channels):
        super().__init__()
        self.tasks, self.channels = tuple(tasks), channels
        self.width = max(task.width for task in self.tasks)
        self.body = TokenBody(config, self.tasks, inputs=channels * self.width,
                              outputs=self.width, scalars=2)

    def forward(self, x, c_noise, context, dt, cond, task=0, inputs=None):
        """x (B, N, D), c_noise (B,), context [(B, N, D), ..], dt (B,), cond (B, P) -> (B, N, D)"""
        width = self.tasks[task].width
        x = torch.cat([self._own(x, width), *context], -1)
        if x.shape[-1] != self.channels * self.width:
            raise ValueError(f"x and context have {x.shape[-1]} channels in all, not "
                             f"{self.channels} x {self.width}.")
        scalars = torch.stack([torch.log10(dt), c_noise], -1)
        return self._own(self.body(x, scalars, cond, task, inputs), width)

    def _own(self, x, width):
        """Zero in the padding: what noise there is must neither be read nor be answered."""
        return F.pad(x[..., :width], (0, self.width - width))
