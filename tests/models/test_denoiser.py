"""The denoiser starts at zero, reads all that it is given, and nothing of the padding."""

import math
import re

import pytest
import torch
from factual import CIRCLE, WALLS

from ups.models.body import BODIES, BodyConfig
from ups.models.diffusion import denoising_loss
from ups.models.generators import Denoiser
from ups.models.latent_operator import TaskSpec

LINE = TaskSpec("line", (1, 1, 16), 4, CIRCLE, ("nu",))
PLATE = TaskSpec("plate", (1, 6, 8), 6, WALLS, ("beta", "nu"))
MIX = (LINE, PLATE)
each_body = pytest.mark.parametrize("body", BODIES)


def make(body, channels=3, started=True):
    """A small denoiser; `started` moves the zero-initialised weights away from zero."""
    torch.manual_seed(0)
    config = BodyConfig(body=body, dim=16, depth=3, heads=2, modes=4, window=4)
    model = Denoiser(config, MIX, channels)
    if started:
        for name, weight in model.named_parameters():
            if "modulation" in name or "body.out" in name:
                torch.nn.init.normal_(weight, std=0.3)
    return model


def batch(model, task=0, dtype=torch.float32):
    """x, c_noise, context, dt, cond; latents are zero in the padding, as a cache gives them."""
    spec, generator = MIX[task], torch.Generator().manual_seed(1)

    def latent():
        z = torch.randn(2, math.prod(spec.tokens), model.width, generator=generator)
        return z.to(dtype) * (torch.arange(model.width) < spec.width)

    return (latent(), torch.tensor([-0.5, 0.25], dtype=dtype),
            [latent() for _ in range(model.channels - 1)], torch.tensor([0.01, 1.0], dtype=dtype),
            torch.randn(2, 2, generator=generator).to(dtype))


@each_body
@pytest.mark.parametrize("task", range(2))
def test_starts_at_zero_and_every_parameter_has_a_gradient(body, task):
    for channels in (2, 3):
        model = make(body, channels, started=False)
        assert not model(*batch(model, task), task).any()
    model = make(body)
    x, _, *rest = batch(model, task)
    weight = (torch.arange(model.width) < MIX[task].width).float()
    loss = denoising_loss(lambda y, c: model(y, c, *rest, task), x, torch.tensor([0.5, 1.2]),
                          torch.randn(x.shape), weight)
    loss.sum().backward()
    for name, p in model.named_parameters():  # all but what is another task's own
        owner = re.search(r"\.(?:inp|out|task|mixer|mlp)\.(\d+)", name)
        assert (p.grad is not None) == (not owner or int(owner[1]) == task), name
    assert all(p.grad.abs().sum() > 0 for p in model.body.inp[task].parameters())


@each_body
def test_every_input_enters_and_padding_does_not(body):
    model = make(body)
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
    with pytest.raises(ValueError, match="12 channels in all, not 3 x 6"):
        model(x, c_noise, [z0], dt, cond)


@each_body
def test_float64_and_autocast(body):
    model = make(body)
    out = model(*batch(model, 1), 1)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(*batch(model, 1), 1)
    assert (rough - out).norm() < 0.05 * out.norm()
    fine = model.double()(*batch(model, 1, torch.float64), 1)
    assert fine.dtype == torch.float64 and (fine - out).norm() < 1e-4 * fine.norm()


def test_compiles_into_one_graph():
    """With one body; that each compiles is tested with the operator."""
    model = make("plain")
    inputs = batch(model, 1)
    out = model(*inputs, 1)
    torch.compiler.reset()
    model.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    compiled = model(*inputs, 1)
    compiled.sum().backward()
    torch.testing.assert_close(compiled, out)
