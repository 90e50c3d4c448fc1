"""Generators find a distribution that is known; at the start they are what they say."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from linear import KEEP, TASK, TASKS, VARIANCE, Windows, batch_of, states

import train_consistency
import train_diffusion
import train_ensemble
from ups.models.body import BodyConfig
from ups.models.generators import Diffusion, Ensemble, ResidualLaw
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.train.optim import Muon, set_lr, warmup_then_linear

SIZES = dict(dim=16, depth=2, modes=4, kernel=3)
CFG = SimpleNamespace(augment=False, noise=0, draws=8, seed=0, batch_size=32, sigma_mean=-0.4,
                      sigma_std=1.4)
WRONG = 1.2  # by this the law of the residuals is made wrong, so that there is something to learn


def train(model, loss, draw, steps, lr, **options):
    """Train on the linear system; leave the average of the last half of the steps."""
    optimizer, mean = Muon(model, lr, momentum=0.9, **options), []
    for step in range(steps):
        set_lr(optimizer, lr * warmup_then_linear(step + 1, 10, steps))
        with torch.no_grad():
            batch = draw(batch_of(step))
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
        if step >= steps // 2:
            mean.append([p.detach().clone() for p in model.parameters()])
    with torch.no_grad():
        for p, *values in zip(model.parameters(), *mean, strict=True):
            p.copy_(torch.stack(values).mean(0))
    return model.requires_grad_(False)


@torch.no_grad()
def drawn(model, rows=6, members=1000):
    """First states (rows, N, 2) and what a model draws after each (rows, members, N, 2)."""
    generator = torch.Generator().manual_seed(5)
    z0 = states(rows, generator)
    z = z0.repeat_interleave(members, 0)
    noise = torch.randn(len(z), model.numbers(0), generator=generator)
    x = model.step(z, torch.ones(len(z)), torch.zeros(len(z), 0), 0, noise)
    return z0, x.unflatten(0, (rows, members))


def found(model):
    """Error of the mean / spread, and variance / the true one, of each channel."""
    z0, x = drawn(model)
    error = (x.mean(1) - KEEP * z0).norm() / (KEEP * z0).norm()
    return error.item(), (x.var(1).mean((0, 1)) / VARIANCE).tolist()


def faint(model):
    """Variance of short waves of channel 0, which truly have none."""
    return torch.fft.rfft(drawn(model)[1][..., 0])[..., 3:].var(1).mean().item()


@pytest.fixture(scope="module")
def operator():
    torch.manual_seed(0)
    model = LatentOperator(BodyConfig(**SIZES), [TASK])

    def loss(model, batch):
        z0, z1 = batch["z"].unbind(1)
        return (model(z0, batch["dt"], batch["cond"]) - z1).square().mean((1, 2))

    return train(model, loss, lambda batch: batch, 150, 1e-2)


def wrong(law, operator):
    law.measure(operator, Windows())
    law.law0[0] += torch.tensor(WRONG).log()
    law.law0[3] *= 10  # what is seen is no limit here
    return law


def check(model, most=0.05):
    error, ratios = found(model)
    assert error < 0.05 and all(abs(ratio - 1) < most for ratio in ratios), (error, ratios)


def test_the_ensemble_finds_mean_and_variance(operator):
    torch.manual_seed(1)
    model = Ensemble(BodyConfig(**SIZES), [TASK])
    model.load_state_dict(operator.state_dict(), strict=False)
    wrong(model.law, operator)
    assert all(ratio > 1.3 for ratio in found(model)[1])
    before = faint(model)
    check(train(model, partial(train_ensemble.ensemble_loss, law=model.law, tasks=TASKS,
                               anchor=0.3),
                lambda batch: train_ensemble.draw(batch, CFG, model), 250, 1e-2))
    assert faint(model) < 2 * before  # points hardly see them: CRPS of fields alone lets them grow


def test_the_diffusion_and_its_student_find_mean_and_variance(operator):
    torch.manual_seed(1)
    model = Diffusion(BodyConfig(**SIZES), [TASK], operator)
    law = wrong(model.law, operator)
    assert all(ratio > 1.3 for ratio in found(model)[1])
    train(model, partial(train_diffusion.diffusion_loss, operator=operator,
                         law=copy.deepcopy(law), tasks=TASKS),
          lambda batch: train_diffusion.draw(batch, CFG, TASKS), 300, 5e-3, rms=0.4)
    check(model, 0.08)
    student = copy.deepcopy(model).requires_grad_(True)
    student.operator, student.kind, student.calls = (operator,), "consistency", 2
    assert min(found(student)[1]) < 0.85  # it has yet to learn to jump
    check(train(student, partial(train_consistency.student_loss, teacher=model, tasks=TASKS),
                lambda batch: train_consistency.draw(batch, CFG, TASKS), 100, 4e-3, rms=0.4), 0.08)


@pytest.mark.parametrize("several", [False, True])
def test_without_noise_an_ensemble_is_the_operator_bit_for_bit(several):
    torch.manual_seed(0)
    other = TaskSpec("plate", (1, 4, 4), 3, (True, False, False), ("nu",))
    tasks = [TASK, other] if several else [TASK]
    operator = LatentOperator(BodyConfig(**SIZES), tasks)
    for p in operator.parameters():  # trained, as it were
        torch.nn.init.normal_(p, std=0.1)
    model = Ensemble(BodyConfig(**SIZES), tasks)
    model.load_state_dict(operator.state_dict(), strict=False)
    for index in range(len(tasks)):
        model.law.fit(index, [(torch.randn(50, 16, tasks[index].width), torch.randn(
            50, 16, tasks[index].width))])
        z = torch.randn(4, 16, model.width)
        given = z, torch.ones(4), torch.zeros(4, int(several)), index
        nothing = torch.zeros(4, model.numbers(index))
        assert torch.equal(model.step(*given, nothing), operator(*given))
        moved = (model.step(*given, torch.randn(4, model.numbers(index))) - operator(*given)).abs()
        assert moved[..., :tasks[index].width].min() > 0 == moved[..., tasks[index].width:].sum()


def test_the_law_has_the_size_and_the_covariance_of_residuals():
    """Of a field with correlated channels, three times as large where the change is."""
    torch.manual_seed(0)
    task = TaskSpec("a", (1, 8, 6), 2, (True,) * 3, weight=(1.5, 0.5))
    law, white = ResidualLaw([task]), torch.randn(20_000, 8, 6, 2)
    field = white + 0.8 * white.roll(1, 1) - 0.5 * white.roll((2, 1), (1, 2)).flip(3)
    scale = torch.exp(torch.linspace(-2, 2, 20_000))[:, None, None]
    change, r = scale**0.5 * torch.ones(20_000, 48, 2), 3 * scale * field.flatten(1, 2)
    seen = law.fit(0, [(c, x) for c, x in zip(change.split(7000), r.split(7000), strict=True)])
    assert seen == pytest.approx(law.norm(r, 0).square().mean().sqrt().item(), rel=1e-5)
    assert law.law0[1].item() == pytest.approx(2, abs=0.03)  # size ~ |change|^2
    x = law.whiten(r, change, 0)
    torch.testing.assert_close(covariance(x), torch.eye(8), atol=0.05, rtol=0)
    torch.testing.assert_close(law.size(change, 0) * law.colour(x, 0), r, rtol=1e-3, atol=1e-3)
    drawn = law.residual(torch.randn(20_000, 48, 2), change[:1].expand_as(change), 0)
    true = covariance(3 * scale[0] * field.flatten(1, 2))
    torch.testing.assert_close(covariance(drawn) / true.diag().mean(), true / true.diag().mean(),
                               atol=0.08, rtol=0)


def covariance(x):
    """Of four tokens and all channels"""
    return torch.cov(x[:, :4].flatten(1).T)
