"""The corrector: draws the true latent z1 given the operator's prediction z1_hat of it.

The operator rolls out alone. After k steps it has predicted z1_hat from its own state z0, and what
is missing, r = z1 - z1_hat, is modelled as a distribution given [z0, z1_hat], the time k dt since
the last true state, and the parameters. Residuals grow with k and differ between latent channels,
so they are divided by their deviation `scale[k]` (D,) over the trajectories of the fit split.

    teacher   along the probability flow, by `multistep`, or `heun` with two calls a step
    student   consistency function, one or two network calls

Both are this one class and may exchange weights; `kind` says how to draw.
"""

import functools

import torch
from torch import nn

from ups.models.denoiser import Denoiser
from ups.models.diffusion import consistency, denoise, few_step, multistep, noise_levels

SIGMAS = 0.01, 10.0  # residuals have unit variance on average, more and less from place to place
LADDER = noise_levels(12, *SIGMAS, rho=20.0)  # along which a teacher is distilled
JUMPS = (0, 4)  # places in it of the student's first and second call


class Corrector(nn.Module):
    """net(x, c_noise | z0, z1_hat, lead, ..) on scaled residuals x, and how to draw with it."""

    def __init__(self, config, tasks, scales, kind="diffusion"):
        """`scales`: for each task the deviation (leads, D) of its residuals."""
        super().__init__()
        self.kind = kind
        self.net = Denoiser(config, tasks, channels=3)
        for index, scale in enumerate(scales):
            self.register_buffer(f"scale{index}", scale)

    def scale(self, task, lead):
        """Deviation (B, 1, D) of the residual after `lead` (B,) steps; zero where padded."""
        table = self.get_buffer(f"scale{task}")
        return table[lead.clamp(max=len(table)) - 1][:, None]

    def forward(self, x, c_noise, z0, z1_hat, lead, dt, cond, task=0):
        """x, z0, z1_hat (B, N, D), lead (B,) int, dt (B,), cond (B, P) -> (B, N, D)"""
        return self.net(x, c_noise, [z0, z1_hat], lead * dt, cond, task)

    @torch.no_grad()
    def draw(self, z0, z1_hat, lead, dt, cond, noise, task, calls, sampler=multistep):
        """z1 (B, N, D) in at most `calls` network calls, from normal numbers noise (B, 2, N, D)."""
        scale = self.scale(task, lead)
        noise = noise * (scale > 0)[:, None]  # none in the padding
        net = functools.partial(self, z0=z0, z1_hat=z1_hat, lead=lead, dt=dt, cond=cond, task=task)
        x = SIGMAS[1] * noise[:, 0]
        if self.kind == "consistency":
            f = functools.partial(consistency, net)
            r = few_step(f, x, LADDER[list(JUMPS[:calls])], lambda i: noise[:, i])
        else:
            steps = calls if sampler is multistep else (calls + 1) // 2
            r = sampler(functools.partial(denoise, net), x, noise_levels(steps, *SIGMAS, rho=20.0))
        return z1_hat + scale * r
