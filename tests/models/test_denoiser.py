"""The denoiser starts at zero, reads all that it is given, and nothing of the padding."""

import math
import re

import pytest
import torch
from factual import CIRCLE, WALLS, started

from ups.models.body import BodyConfig
from ups.models.diffusion import denoising_loss
from ups.models.generators import Denoiser
from ups.models.latent_operator import TaskSpec

LINE = TaskSpec("line", (1, 1, 16), 4, CIRCLE, ("nu",))
PLATE = TaskSpec("plate", (1, 6, 8), 6, WALLS, ("beta", "nu"))
MIX = (LINE, PLATE)


def make(channels=3):
    torch.manual_seed(0)
    return Denoiser(BodyConfig(dim=16, depth=3, modes=4), MIX, channels)


def batch(model, task=0, channels=3):
    """x, c_noise, context, dt, cond; latents are zero in the padding, as a cache gives them."""
    spec, generator = MIX[task], torch.Generator().manual_seed(1)

    def latent():
        z = torch.randn(2, math.prod(spec.tokens), model.width, generator=generator)
        return z * (torch.arange(model.width) < spec.width)

    return (latent(), torch.tensor([-0.5, 0.25]), [latent() for _ in range(channels - 1)],
            torch.tensor([0.01, 1.0]), torch.randn(2, 2, generator=generator))


@pytest.mark.parametrize("task", range(2))
def test_starts_at_zero_and_every_parameter_has_a_gradient(task):
    for channels in (1, 3):
        model = make(channels)
        assert not model(*batch(model, task, channels), task).any()
    model = started(make())
    x, _, *rest = batch(model, task)
    weight = (torch.arange(model.width) < MIX[task].width).float()
    loss = denoising_loss(lambda y, c: model(y, c, *rest, task), x, torch.tensor([0.5, 1.2]),
                          torch.randn(x.shape), weight)
    loss.sum().backward()
    for name, p in model.named_parameters():  # all but what is another task's own
        owner = re.search(r"\.(?:inp|out|task|mixer|mlp)\.(\d+)", name)
        assert (p.grad is not None) == (not owner or int(owner[1]) == task), name
    assert all(p.grad.abs().sum() > 0 for p in model.body.inp[task].parameters())


def test_every_input_enters_and_padding_does_not():
    model = started(make())
    x, c_noise, (z0, z1_hat), dt, cond = batch(model)
    out = model(x, c_noise, [z0, z1_hat], dt, cond)
    changed = [(2 * x, c_noise, [z0, z1_hat], dt, cond), (x, c_noise + 0.5, [z0, z1_hat], dt, cond),
               (x, c_noise, [2 * z0, z1_hat], dt, cond), (x, c_noise, [z0, 2 * z1_hat], dt, cond),
               (x, c_noise, [z0, z1_hat], 2 * dt, cond), (x, c_noise, [z0, z1_hat], dt, cond + 1)]
    for inputs in changed:
        assert (model(*inputs) - out).abs().max() > 1e-3
    assert not out[..., LINE.width:].any() and out[..., :LINE.width].any()
    noisy = x + 7 * (torch.arange(model.width) >= LINE.width)
    assert torch.equal(model(noisy, c_noise, [z0, z1_hat], dt, cond), out)
