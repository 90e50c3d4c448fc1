"""A task whose truth is known: fields that decay, du/dt = -nu u, and an operator that knows it.

The codec is the identity, so everything that an evaluation measures can be computed by hand.
"""

import types
from pathlib import Path

import torch
from factual import facts

NU = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
STEPS, DT = 12, 0.1


class Decaying:
    """`samples` trajectories of each nu, on a grid of one or two axes."""

    all_test, stride_x, frames = False, 1, range(STEPS + 1)

    def __init__(self, name, grid, samples=5):
        self.facts = facts(name, grid, ("u", "v"), STEPS + 1, DT, ("nu",))
        self.samples = samples
        self.files = [types.SimpleNamespace(path=Path("nowhere.h5"), facts=self.facts)]

    def split(self, name):
        return torch.arange(2 * self.samples) + (0 if name == "test" else 100)

    def params(self, chosen):
        return NU[torch.as_tensor(chosen) % 2]

    def read(self, chosen):
        start = [1.5 + torch.randn(2, *self.facts.grid, generator=torch.Generator().manual_seed(
            int(i))) for i in chosen]
        times = torch.arange(STEPS + 1) * DT
        decay = torch.exp(-self.params(chosen) * times).float()  # (B, T)
        return torch.stack(start)[:, None] * decay.view(*decay.shape, *[1] * (1 + len(
            self.facts.grid)))


def decaying(name="burgers1d", grid=(16,), **options):
    fields = Decaying(name, grid, **options)
    return types.SimpleNamespace(
        name=name, fields=fields, facts=fields.facts, strides=(1,), plans={1: []}, history=1,
        encode=lambda u: u.flatten(-len(grid)).mT,
        decode=lambda z: z.mT.unflatten(-1, grid), conserved=[0],
        cond=lambda chosen: fields.params(chosen).float(), inputs=lambda chosen: None,
        noise_scale=torch.ones(2))


def operator(z, dt, cond, task, inputs=None):
    """Decays a tenth too fast."""
    return z * torch.exp(-1.1 * cond[:, :1] * dt[:, None])[..., None]


def noisy(members):
    """A forecast: the truth, with noise of a known size."""
    def forecast(s):
        random = torch.Generator().manual_seed(int(s.chosen[0]))
        for k in range(1, s.steps + 1):
            y = s.u[:, k, None].expand(-1, members, *s.u.shape[2:])
            yield y + 0.05 * torch.randn(y.shape, generator=random)

    return forecast


class Generator:
    """Repairs the operator, and adds noise of a known size."""

    perturbation = None

    def numbers(self, task):
        return 2 * 96

    def step(self, z, dt, cond, task, noise, inputs=None):
        true = operator(z, dt, cond, task) * torch.exp(0.1 * cond[:, :1] * dt[:, None])[..., None]
        return true + 0.05 * noise[:, :z[0].numel()].view_as(z)
