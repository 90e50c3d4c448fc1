"""The steady prior: draws the steady field u that belongs to given inputs v and parameters.

The latents z of u are written in coordinates x (B, N, D) in which |x - x'| is the error of u:

    z = zero + size (center + unit x)            log size = a + b . parameters + c . log mean |v|

`zero` are the latents of u = 0. A solution often grows with a source or a parameter and falls with
a coefficient, so `size` is a power law, fitted in closed form: all samples then count alike, as
they do in an nRMSE.

u follows from v, so p(x | v) is narrow, and a denoiser would have to learn its mean again at every
level of noise. It is therefore a mean and what that leaves, learned one after the other:

    x = m(v) + scale r          m = body(v)
                                r ~ a diffusion with net(r, c_noise | v)

`scale` (D,) is the deviation of x - m on samples that the mean was not trained on.
"""

import functools
import math

import torch
from torch import nn

from ups.models.body import TokenBody
from ups.models.diffusion import angles, multistep
from ups.models.generators import Denoiser
from ups.relative_error import mean_relative_error


class SteadyPrior(nn.Module):
    """The mean m(v), the network of the denoiser, the maps between x and latents."""

    def __init__(self, config, denoiser, task, channels):
        """`config` and `denoiser`: sizes of the two networks; `channels`: how many are given."""
        super().__init__()
        self.body = TokenBody(config, [task], inputs=0, outputs=task.width, scalars=1)
        self.net = Denoiser(denoiser, [task], channels=1)
        tokens, width = math.prod(task.tokens), task.width
        for name, shape in {"zero": (tokens, width), "center": (tokens, width), "unit": (width,),
                            "scale": (width,), "typical": (channels,),
                            "law": (1 + len(task.params) + channels,)}.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, cond, inputs=None, r=None, c_noise=None):
        """m (B, N, D) of cond (B, P), inputs (B, N, E); with r (B, N, D), c_noise (B,), net(r)."""
        one = cond.new_ones(len(cond))
        if r is None:
            nothing = self.zero[:, :0].expand(len(cond), -1, -1)
            return self.body(nothing, one[:, None], cond, inputs=inputs)
        return self.net(r, c_noise, [], one, cond, inputs=inputs)

    def size(self, v, cond):
        """What u is nearly proportional to (B,), from v (B, E, *grid) or None and cond (B, P)."""
        return self._features(v, cond).mv(self.law).exp()

    def _features(self, v, cond):
        columns = [cond.new_ones(len(cond), 1), cond]
        if v is not None:  # a channel that is nearly zero decides nothing
            columns.append((v.abs().flatten(2).mean(2) / self.typical + 1e-3).log())
        return torch.cat(columns, 1)

    def coordinates(self, z, size):
        """x (B, N, D) of the latents of u"""
        return ((z - self.zero) / size[:, None, None] - self.center) / self.unit

    def latent(self, x, size):
        """z (B, N, D), the inverse of `coordinates`"""
        return self.zero + size[:, None, None] * (self.center + self.unit * x)

    @torch.no_grad()
    def draw(self, cond, inputs, noise, calls):
        """scale r (B, N, D) in `calls` network calls, from normal numbers noise (B, N, D)."""
        net = functools.partial(self, cond, inputs)
        return self.scale * multistep(net, noise, angles(calls))

    @torch.no_grad()
    def fit(self, z, v, cond, zero, weight):
        """Set the coordinates from latents z (B, N, D), v, cond of train, those of u = 0, and the
        codec's `weight` (D,). Sums in float64 on the CPU: every rank finds the same."""
        self.zero.copy_(zero)
        if v is not None:
            self.typical.copy_(v.double().abs().flatten(2).mean((0, 2)).clamp(min=1e-30))
        z, weight = (z.cpu() - zero.cpu()).double(), weight.cpu().double()
        norm = (weight * z.square()).sum(2).mean(1).sqrt()
        there = norm > 0
        features = self._features(v, cond).cpu().double()
        self.law.copy_(torch.linalg.lstsq(features[there], norm[there].log()[:, None],
                                          driver="gelsd").solution[:, 0])
        z = z / (features @ self.law.cpu().double()).exp()[:, None, None]
        center = z.mean(0)
        rest = (weight * (z - center).square()).sum(2).mean().sqrt()
        self.center.copy_(center)
        self.unit.copy_(rest / weight.sqrt())


def errors(p, y):
    """Relative errors (B,) of fields p (B, C, *grid) and of their slopes, differences of
    neighbours: these tell a mean to be continuous from patch to patch."""
    def slopes(u):
        return torch.cat([u.diff(dim=axis).flatten(2) for axis in range(2, u.ndim)], 2)

    return mean_relative_error(p, y), mean_relative_error(slopes(p), slopes(y))
