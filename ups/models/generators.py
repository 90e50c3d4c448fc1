"""The corrector: draws the true latent z1 given the operator's prediction z1_hat of it.

The operator rolls out alone. After k steps it has predicted z1_hat from its own state z0, and what
is missing, r = z1 - z1_hat, is modelled as a distribution given [z0, z1_hat], the time k dt since
the last true state, and the parameters. Residuals grow with k, differ between latent channels, and
are far larger at fronts than elsewhere, so for each lead and channel they are compressed to

    x = asinh(r / s) / c,    s the median of |r|, c the root mean square of asinh(r / s)

over the trajectories of the fit split: linear where r is small, a logarithm where it is large.

    teacher   along the probability flow, by `multistep`, or `heun` with two calls a step
    student   consistency function, one or two network calls
    0 calls   x is drawn from N(0, 1): no network, a yardstick for what it gains

Both are this one class and may exchange weights; `kind` says how to draw. The network is a
`Denoiser`, which also serves the steady prior.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.body import TokenBody
from ups.models.diffusion import consistency, denoise, few_step, multistep, noise_levels
from ups.models.latent_operator import ConserveMean

SIGMAS = 0.01, 10.0  # compressed residuals have unit variance
LADDER = noise_levels(8, *SIGMAS, rho=20.0)  # along which a teacher is distilled
JUMPS = (0, 3)  # places in it of the student's first and second call


class Denoiser(nn.Module):
    """net(x, c_noise | context, dt, cond): a `TokenBody` reads the noisy tokens and their context,
    joined by channel. Zero at the start, so that D(x; sigma) = c_skip x, and in the padding.

        corrector   [noisy residual, z0, z1_hat]    channels = 3
        steady      [noisy u-latent, a-latent]      channels = 2
    """

    def __init__(self, config, tasks, channels):
        super().__init__()
        self.tasks, self.channels = tuple(tasks), channels
        self.width = max(task.width for task in self.tasks)
        self.body = TokenBody(config, self.tasks, inputs=channels * self.width,
                              outputs=self.width, scalars=2)

    def forward(self, x, c_noise, context, dt, cond, task=0, inputs=None):
        """x (B, N, D), c_noise (B,), context [(B, N, D), ..], dt (B,), cond (B, P) -> (B, N, D)"""
        width = self.tasks[task].width
        x = torch.cat([self._valid(x, width), *context], -1)
        if x.shape[-1] != self.channels * self.width:
            raise ValueError(f"x and context have {x.shape[-1]} channels in all, not "
                             f"{self.channels} x {self.width}.")
        scalars = torch.stack([torch.log10(dt), c_noise], -1)
        return self._valid(self.body(x, scalars, cond, task, inputs), width)

    def _valid(self, x, width):
        """Zero in the padding: what noise there is must neither be read nor be answered."""
        return F.pad(x[..., :width], (0, self.width - width))


class Corrector(nn.Module):
    """net(x, c_noise | z0, z1_hat, lead, ..) on scaled residuals x, and how to draw with it."""

    def __init__(self, config, tasks, tables, kind="diffusion"):
        """`tables`: for each task, those of `compression` (3, leads, D)."""
        super().__init__()
        self.kind = kind
        self.net = Denoiser(config, tasks, channels=3)
        self.conserve = ConserveMean(tasks)
        for index, table in enumerate(tables):
            self.register_buffer(f"table{index}", table)

    @property
    def hidden(self):
        """The layers whose matrices are Muon's."""
        return self.net.body.hidden

    def leads(self, task):
        """The steps of the roll-outs that it was trained on"""
        return self.get_buffer(f"table{task}").shape[1]

    def table(self, task, lead):
        """s, c and the largest asinh(r / s) after `lead` (B,) steps: (B, 3, 1, D)."""
        return self.get_buffer(f"table{task}")[:, lead - 1].transpose(0, 1)[:, :, None]

    def forward(self, x, c_noise, z0, z1_hat, lead, dt, cond, task=0, inputs=None):
        """x, z0, z1_hat (B, N, D), lead (B,) int, dt (B,), cond (B, P) -> (B, N, D)"""
        return self.net(x, c_noise, [z0, z1_hat], lead * dt, cond, task, inputs)

    @torch.no_grad()
    def draw(self, z0, z1_hat, lead, dt, cond, noise, task, calls, sampler=multistep, inputs=None):
        """z1 (B, N, D) in at most `calls` network calls, from normal numbers noise (B, 2, N, D)."""
        lead = lead.clamp(max=self.leads(task))  # later: as the last
        table = self.table(task, lead)
        noise = noise * (table[:, :1] > 0)  # none in the padding
        net = functools.partial(self, z0=z0, z1_hat=z1_hat, lead=lead, dt=dt, cond=cond, task=task,
                                inputs=inputs)
        x = SIGMAS[1] * noise[:, 0]
        if calls == 0:
            r = noise[:, 0]
        elif self.kind == "consistency":
            f = functools.partial(consistency, net)
            r = few_step(f, x, LADDER[list(JUMPS[:calls])], lambda i: noise[:, i])
        else:
            steps = calls if sampler is multistep else (calls + 1) // 2
            r = sampler(functools.partial(denoise, net), x, noise_levels(steps, *SIGMAS, rho=20.0))
        r, width = expand(r, table), self.net.tasks[task].width
        return z1_hat + F.pad(self.conserve(r[..., :width], task), (0, r.shape[-1] - width))


def compression(r, lead):
    """The table (3, leads, D) of residuals r (n, N, D) at leads (n,); zero in the padding."""
    rows = []
    for k in range(1, int(lead.max()) + 1):
        size = r[lead == k].flatten(0, 1).abs()  # (rows, D)
        s = size.median(0).values.clamp(min=1e-3 * size.square().mean(0).sqrt())
        x = torch.asinh(size / torch.where(s > 0, s, 1.0))
        rows.append(torch.stack([s, x.square().mean(0).sqrt(), x.max(0).values]))
    return torch.stack(rows, 1)


def compress(r, table):
    """r (B, N, D) -> x of unit variance"""
    s, c, _ = table.unbind(1)
    valid = s > 0
    return valid * torch.asinh(r / torch.where(valid, s, 1.0)) / torch.where(valid, c, 1.0)


def expand(x, table):
    """x (B, N, D) -> r, nowhere larger than residuals were seen to be"""
    s, c, most = table.unbind(1)
    return s * torch.sinh((c * x).clamp(-most, most))
