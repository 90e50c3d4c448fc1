"""The steady prior: draws the steady field u that belongs to a coefficient a.

The two frames of a steady task, (a, 0) and (a, u), have the latents z0 and z1. What u adds to z0 is
written in coordinates x (B, N, D) of its own, the principal components of that difference, so that
|x - x'| is the error of u; beyond the K that matter they are zero:

    z1 = z0 + size (center + x basis)         size = beta / mean(a)

since u is proportional to beta and to 1/a: all samples then count alike, as they do in an nRMSE.

u follows from a, so p(x | a) is narrow, and a denoiser would have to learn its mean again at every
level of noise. It is therefore a mean and what that leaves, learned one after the other:

    x = m(a) + scale r          m = body(z0)
                                r ~ D(r; sigma) = c_skip r + c_out net(c_in r, c_noise | z0)

`scale` (D,) is the deviation of x - m on samples that the mean was not trained on.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from ups.models.body import TokenBody
from ups.models.diffusion import denoise, multistep, noise_levels
from ups.models.generators import SIGMAS, Denoiser


class SteadyPrior(nn.Module):
    """The mean m(a), the network of the denoiser, the maps between x and latents."""

    def __init__(self, config, denoiser, task):
        """`config` and `denoiser`: sizes of the two networks."""
        super().__init__()
        self.body = TokenBody(config, [task], inputs=task.width, outputs=task.width, scalars=1)
        self.net = Denoiser(denoiser, [task], channels=2)
        tokens, width = math.prod(task.tokens), task.width
        self.register_buffer("center", torch.zeros(tokens, width))
        self.register_buffer("basis", torch.zeros(width, width))  # rows: components
        self.register_buffer("dual", torch.zeros(width, width))   # columns: components
        self.register_buffer("scale", torch.zeros(width))

    def forward(self, z0, cond, r=None, c_noise=None, inputs=None):
        """m(a) (B, N, D) of z0 (B, N, D), cond (B, P); with r like z0 and c_noise (B,), net(r)."""
        one = torch.ones_like(cond[:, 0])
        if r is None:
            return self.body(z0, torch.log10(one)[:, None], cond, inputs=inputs)
        return self.net(r, c_noise, [z0], one, cond, inputs=inputs)

    def coordinates(self, z0, z1, size):
        """x (B, N, D) of u"""
        return ((z1 - z0) / size[:, None, None] - self.center) @ self.dual

    def latent(self, z0, x, size):
        """z1 (B, N, D), the inverse of `coordinates`"""
        return z0 + size[:, None, None] * (self.center + x @ self.basis)

    def scaled(self, difference):
        """r (B, N, D) of x - m"""
        own = self.scale > 0
        return own * difference / torch.where(own, self.scale, 1.0)

    @torch.no_grad()
    def draw(self, z0, cond, noise, calls, inputs=None):
        """scale r (B, N, D) in `calls` network calls, from normal numbers noise (B, N, D)."""
        x = SIGMAS[1] * (self.scale > 0) * noise
        denoiser = functools.partial(denoise, functools.partial(self, z0, cond, inputs=inputs))
        return self.scale * multistep(denoiser, x, noise_levels(calls, *SIGMAS, rho=20.0))

    @torch.no_grad()
    def fit(self, differences, weight, error):
        """Set the coordinates from `differences`, (z1 - z0) / size (B, N, D) a batch at a time.

        `weight` (D,) is the codec's; components that are `error` of the deviation in all are left
        out. Symmetric sums in float64: every rank finds the same.
        """
        count, first, second = 0, 0.0, 0.0
        for d in differences:
            d = d.double()
            count, first = count + len(d), first + d.sum(0)
            second = second + torch.einsum("bni,bnj->ij", d, d)
        center = first / count
        metric = weight.double().sqrt()
        covariance = (second / count - center.mT @ center) / len(center) * metric.outer(metric)
        variance, vectors = torch.linalg.eigh(covariance)
        variance, vectors = variance.flip(0).clamp(min=0), vectors.flip(1)
        rest = variance.flip(0).cumsum(0).flip(0)  # of component k and all beyond
        own = rest > error**2 * rest[0]
        size = rest[0].sqrt()
        self.center.copy_(center)
        self.basis.copy_((vectors * own).mT * size / metric)
        self.dual.copy_(vectors * own * metric[:, None] / size)


def size_of(a, cond):
    """beta / mean(a) (B,), which u is proportional to; a (B, *grid), cond (B, 1) log10 of beta."""
    return 10 ** cond[:, 0] / a.flatten(1).mean(1)


def orientations(grid):
    """All eight of a square, else the four reflections."""
    return 8 if grid[0] == grid[1] else 4


def turned(u, turn):
    """Fields (B, ..., n, n) in the orientations turn (B,), 0 to 7: two reflections, a transpose."""
    turn = turn.view(-1, *[1] * (u.ndim - 1))
    u = torch.where((turn & 1).bool(), u.flip(-1), u)
    u = torch.where((turn & 2).bool(), u.flip(-2), u)
    return torch.where((turn & 4).bool(), u.mT, u)


def turned_back(u, turn):
    """The inverse of `turned`: a transpose exchanges the reflections."""
    return turned(u, turn.new_tensor((0, 1, 2, 3, 4, 6, 5, 7))[turn])


def relative(p, y):
    """|p - y| / |y| (B,)"""
    return ((p - y).flatten(1).square().sum(1) / y.flatten(1).square().sum(1) + 1e-12).sqrt()


def slopes(u):
    """Differences of neighbours (B, *) of u (B, n, m), which is zero outside."""
    u = F.pad(u, (1, 1, 1, 1))
    return torch.cat([u.diff(dim=1).flatten(1), u.diff(dim=2).flatten(1)], 1)
