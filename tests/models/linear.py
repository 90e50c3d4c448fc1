"""A linear system with noise, whose next state has a known distribution, as a task to train on.

    z1 = 0.8 z0 + 0.3 (xi_1 cos 2 x + xi_2 sin 2 x) in channel 0, + 0.1 xi_n at each token in 1
"""

import math
from types import SimpleNamespace

import torch
from factual import CIRCLE

from ups.models.latent_operator import TaskSpec

N, KEEP = 16, 0.8
TASK = TaskSpec("linear", (1, 1, N), 2, CIRCLE)
VARIANCE = torch.tensor([0.09, 0.01])


def states(count, generator):
    """z0 (B, N, 2), smooth."""
    x = 2 * math.pi * torch.arange(N) / N
    waves = torch.stack([torch.cos(x), torch.sin(x), torch.cos(3 * x), torch.sin(3 * x)])
    return (torch.randn(count, 2, 4, generator=generator) @ waves).mT


def following(z0, generator):
    """z1 (B, N, 2)"""
    x = 4 * math.pi * torch.arange(N) / N
    forced = torch.randn(len(z0), 2, generator=generator) @ torch.stack([x.cos(), x.sin()])
    white = torch.randn(len(z0), N, generator=generator)
    return KEEP * z0 + torch.stack([0.3 * forced, 0.1 * white], -1)


def batch_of(step, rows=32):
    generator = torch.Generator().manual_seed(step)
    z0 = states(rows, generator)
    z1 = following(z0, generator)
    return {"z": torch.stack([z0, z1], 1), "dt": torch.ones(rows), "cond": torch.zeros(rows, 0),
            "task": 0, "stride": 1, "step": step, "rows": torch.arange(rows)}


class Windows:
    """What a split gives: windows of one step."""

    sizes = [2048]

    def __getitems__(self, triples):
        return batch_of(10**6 + triples[0][2][1], len(triples))


TASKS = [SimpleNamespace(
    spec=TASK, augment=lambda z, move, inputs: (z, inputs), noise=lambda z0, z1, batch: 0.0,
    relative_error=lambda p, z: (p - z).norm(dim=(1, 2)) / z.norm(dim=(1, 2)),
    typical_change={1: 1.0}, channel_weight=torch.ones(2), decode=lambda z: z.mT,
    codec=SimpleNamespace(std=torch.ones(2)))]
