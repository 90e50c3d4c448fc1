"""Samplers and losses against distributions whose denoiser and flow are known in closed form."""

import math

import pytest
import torch

from ups.models.diffusion import (
    consistency,
    denoise,
    denoising_loss,
    distillation_loss,
    few_step,
    multistep,
    noise_levels,
    precondition,
    training_sigma,
)

MEAN, STD = 0.7, 0.5                                     # a Gaussian
CENTRES, SHARES, WIDTH = (-1.2, 0.8), (0.4, 0.6), 0.25   # a mixture of two


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def over(sigma, x):
    return sigma.view(-1, *[1] * (x.ndim - 1))


def gaussian(x, sigma):
    """E[clean | x] of the Gaussian."""
    s2 = over(sigma, x) ** 2
    return (MEAN * s2 + STD**2 * x) / (STD**2 + s2)


def gaussian_flow(x, sigma, after):
    spread = torch.sqrt((STD**2 + over(after, x) ** 2) / (STD**2 + over(sigma, x) ** 2))
    return MEAN + (x - MEAN) * spread


def gaussian_jump(x, sigma):
    """The consistency function of the Gaussian."""
    return gaussian_flow(x, sigma, torch.full_like(sigma, 0.002))


def mixture(x, sigma):
    """E[clean | x] of the mixture."""
    v = over(sigma, x)[..., None] ** 2 + WIDTH**2
    centres, y = x.new_tensor(CENTRES), x[..., None] - x.new_tensor(CENTRES)
    share = torch.softmax(x.new_tensor(SHARES).log() - y**2 / (2 * v), -1)
    return (share * (centres + WIDTH**2 / v * y)).sum(-1)


def mixture_quantiles(p, sigma):
    """x with P(X < x) = p, by bisection; a flow in one dimension keeps every point's p."""
    lo, hi = torch.full_like(p, -500.0), torch.full_like(p, 500.0)
    width = math.sqrt(WIDTH**2 + sigma**2)
    for _ in range(80):
        x = (lo + hi) / 2
        below = sum(w * torch.special.ndtr((x - m) / width)
                    for w, m in zip(SHARES, CENTRES, strict=True)) < p
        lo, hi = torch.where(below, x, lo), torch.where(below, hi, x)
    return x


def midpoints(count):
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count).view(1, -1, 1)


def wasserstein(x, quantiles):
    return (x.flatten().sort()[0] - quantiles.flatten()).abs().mean()


# preconditioning and training

def test_the_limits_of_the_preconditioning():
    sigma = torch.tensor([1e-8, 1e8], dtype=torch.float64)
    c_skip, c_out, c_in, c_noise = precondition(sigma, 0.5)
    torch.testing.assert_close(c_skip, sigma.new_tensor([1.0, 0.25e-16]))
    torch.testing.assert_close(c_out, sigma.new_tensor([1e-8, 0.5]))
    torch.testing.assert_close(c_in, sigma.new_tensor([2.0, 1e-8]))
    torch.testing.assert_close(c_noise, sigma.log() / 4)


@pytest.mark.parametrize("sigma", [0.002, 0.3, 1.0, 80.0])
def test_input_and_target_of_the_network_have_unit_variance(sigma):
    clean, noise = 0.5 * normal(200_000, 1, 1), normal(200_000, 1, 1, seed=1)
    x = clean + sigma * noise
    c_skip, c_out, c_in, _ = precondition(torch.tensor(sigma, dtype=torch.float64), 0.5)
    assert abs((c_in * x).var() - 1) < 0.02
    assert abs(((clean - c_skip * x) / c_out).var() - 1) < 0.02
    # a network that answers zero, as at the start, has a loss of one at every level
    loss = denoising_loss(lambda x, c: 0 * x, clean, torch.full((200_000,), sigma), noise, 0.5)
    assert loss.shape == (200_000,) and abs(loss.mean() - 1) < 0.02


def test_denoise_calls_the_network_once_and_meets_its_target():
    """The network that undoes the preconditioning gives back the analytic denoiser."""
    calls = []

    def net(y, c_noise):
        calls.append(c_noise)
        sigma = torch.exp(4 * c_noise)
        c_skip, c_out, c_in, _ = (over(c, y) for c in precondition(sigma, 0.5))
        return (gaussian(y / c_in, sigma) - c_skip * y / c_in) / c_out

    x, sigma = normal(3, 4, 2), torch.tensor([0.01, 1.0, 50.0], dtype=torch.float64)
    torch.testing.assert_close(denoise(net, x, sigma, 0.5), gaussian(x, sigma))
    assert len(calls) == 1 and calls[0].shape == (3,)


def test_training_levels_are_log_normal():
    log = training_sigma(normal(100_000)).log()
    assert abs(log.mean() + 1.2) < 0.02 and abs(log.std() - 1.2) < 0.02


@pytest.mark.parametrize("sigma", [0.1, 0.5, 3.0])
def test_the_minimiser_of_the_loss_is_the_posterior_mean(sigma):
    """Two points of data times two of noise have the moments of Gaussians, which is all that a
    linear network can see: its best fit, found by Newton's step, is the mean given x."""
    clean = torch.tensor([MEAN - STD, MEAN + STD], dtype=torch.float64).repeat(2).view(4, 1, 1)
    noise = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64).view(4, 1, 1)
    level = torch.full((4,), sigma, dtype=torch.float64)

    def loss(w):
        return denoising_loss(lambda y, c: w[0] * y + w[1], clean, level, noise, 0.8).mean()

    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(loss(w), w)[0]
    hessian = torch.autograd.functional.hessian(loss, w)
    w = -torch.linalg.solve(hessian, gradient)
    x = normal(4, 1, 1)
    best = denoise(lambda y, c: w[0] * y + w[1], x, level, 0.8)
    torch.testing.assert_close(best, gaussian(x, level))
    left = STD**2 * sigma**2 / (STD**2 + sigma**2) / precondition(level, 0.8)[1][0] ** 2
    torch.testing.assert_close(loss(w), left)


def test_the_weights_of_channels():
    clean, noise, sigma = normal(2, 5, 3), normal(2, 5, 3, seed=1), normal(2).exp()
    weight = torch.tensor([1.5, 0.5, 0.0], dtype=torch.float64)

    def error(y, c):
        return y.new_tensor([1.0, 2.0, 1e6]) + (clean - c_skip * x) / c_out

    c_skip, c_out = (over(c, clean) for c in precondition(sigma)[:2])
    x = clean + over(sigma, clean) * noise
    loss = denoising_loss(error, clean, sigma, noise, weight=weight)
    torch.testing.assert_close(loss, loss.new_tensor([1.75, 1.75]))  # (1.5 * 1 + 0.5 * 4) / 2
    zero = denoising_loss(error, clean, sigma, noise, weight=weight.new_tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(zero, loss.new_tensor([4.0, 4.0]))


# sampling

def test_noise_levels():
    levels = noise_levels(18)
    assert levels.shape == (19,) and levels[-1] == 0 and (levels.diff() < 0).all()
    torch.testing.assert_close(levels[[0, 17]], torch.tensor([80.0, 0.002]))
    torch.testing.assert_close(levels[:-1] ** (1 / 7), torch.linspace(80 ** (1 / 7),
                                                                      0.002 ** (1 / 7), 18))
    assert noise_levels(1).tolist() == [80.0, 0.0]
    assert noise_levels(3, 0.1, 10.0, 1.0)[1].item() == pytest.approx(5.05)


def orders(error, steps=(16, 32, 64, 128)):
    errors = [error(noise_levels(n, sigma_min=1e-3)).item() for n in steps]
    return [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)], errors


def test_samplers_follow_the_flow_of_a_gaussian_at_second_order():
    x = 80 * normal(4, 16, 1)
    exact = gaussian_flow(x, torch.full((4,), 80.0), torch.zeros(4))
    found, errors = orders(lambda sigmas: (multistep(gaussian, x, sigmas) - exact).abs().max())
    assert all(1.8 < order < 2.4 for order in found), (found, errors)
    assert errors[-1] < 2e-3


def test_samplers_follow_the_flow_of_a_mixture_at_second_order():
    p = midpoints(2000)
    x, exact = mixture_quantiles(p, 80.0), mixture_quantiles(p, 0.0)
    found, errors = orders(lambda sigmas: wasserstein(multistep(mixture, x, sigmas), exact))
    assert all(1.8 < order < 2.7 for order in found), (found, errors)
    assert errors[-1] < 6e-4
    sample = multistep(mixture, x, noise_levels(64))
    assert abs(sample.mean()) < 2e-3                        # 0.4 * -1.2 + 0.6 * 0.8 = 0
    assert abs(sample.var() - (0.96 + WIDTH**2)) < 5e-3     # 0.4 * 1.44 + 0.6 * 0.64 = 0.96


def test_few_calls_keep_the_spread_of_narrow_data():
    """Data ten times narrower than their scale, in eight calls."""
    x, levels = 10 * normal(1, 20_000, 1), noise_levels(8, 0.01, 10.0, rho=20.0)
    calls = []

    def narrow(x, sigma):
        calls.append(sigma)
        return x * 0.1**2 / (0.1**2 + over(sigma, x) ** 2)

    assert abs(multistep(narrow, x, levels).std() / 0.1 - 1) < 0.05 and len(calls) == 8


# consistency

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma_data", [1.0, 0.3])
def test_the_boundary_condition_is_exact(dtype, sigma_data):
    x = normal(3, 4, 2).to(dtype)
    sigma = torch.full((3,), 0.002, dtype=dtype)
    wild = consistency(lambda y, c: 1e6 * y + 1e9, x, sigma, sigma_data=sigma_data)
    assert torch.equal(wild, x)
    assert not torch.equal(consistency(lambda y, c: 1e6 * y, x, 1.01 * sigma), x)


def test_the_student_starts_as_its_teacher_denoises():
    x, sigma = normal(4, 5, 2), torch.tensor([0.1, 1.0, 10.0, 80.0], dtype=torch.float64)

    def net(y, c_noise):
        return torch.sin(3 * y) + over(c_noise, y)

    student, teacher = consistency(net, x, sigma), denoise(net, x, sigma)
    assert (student - teacher).abs().max() < 5e-3
    torch.testing.assert_close(consistency(net, x, sigma, sigma_min=0.0), teacher)


def test_the_exact_consistency_function_is_a_fixed_point():
    """Only the sampler's error is left, second order: the loss, its square, falls by 16."""
    x = MEAN + math.sqrt(STD**2 + 80**2) * normal(64, 8, 1)

    def loss(f, steps):
        value = distillation_loss(f, gaussian, x, noise_levels(steps).double(), [0, steps // 2])
        assert value.shape == (64,)
        return value.mean().item()

    exact = [loss(gaussian_jump, n) for n in (16, 32, 64)]
    assert exact[1] < 1e-4 and exact[2] < 1e-5
    assert 8 < exact[0] / exact[1] < 40 and 8 < exact[1] / exact[2] < 40
    assert loss(gaussian, 32) > 100 * exact[1]              # a denoiser is not a jump


def test_the_teacher_has_no_gradient_and_the_weight_is_used():
    x, sigmas = normal(2, 4, 2), noise_levels(4).double()
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = distillation_loss(lambda x, s: a * x, lambda x, s: b * gaussian(x, s), x, sigmas, [0, 2],
                             weight=x.new_tensor([1.0, 0.0]))
    loss.sum().backward()
    assert b.grad is None and a.grad[0] != 0 and a.grad[1] == 0


def test_few_steps_of_the_exact_function_give_the_distribution():
    x = MEAN + math.sqrt(STD**2 + 80**2) * normal(1, 50_000, 1)
    exact = MEAN + STD * torch.special.ndtri(midpoints(50_000))
    calls = []

    def f(x, sigma):
        calls.append(sigma)
        return gaussian_jump(x, sigma)

    one = few_step(f, x, torch.tensor([80.0]))
    assert len(calls) == 1 and wasserstein(one, exact) < 0.01
    seen = []

    def noise(i):
        seen.append(i)
        return normal(1, 50_000, 1, seed=i)

    three = few_step(f, x, torch.tensor([80.0, 2.0, 0.3]), noise)
    assert len(calls) == 4 and seen == [1, 2] and calls[-1].shape == (1,)
    assert wasserstein(three, exact) < 0.01 and (three - one).abs().mean() > 0.1
    last = few_step(f, x, torch.tensor([80.0, 0.002]), noise)
    torch.testing.assert_close(last, one, rtol=0, atol=1e-4)


def test_distillation_ends_in_one_call_where_the_sampler_ends():
    """One scale and one shift per level: an affine flow needs no more."""
    sigmas = noise_levels(12).double()
    levels = sigmas[:-1]
    table = torch.zeros(len(levels), 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)

    def student(x, sigma):
        w = table[(levels.log() - sigma.log()[:, None]).abs().argmin(1)]
        return consistency(lambda y, c: over(w[:, 0], y) * y + over(w[:, 1], y), x, sigma,
                           sigma_data=STD)

    x = levels[0] * normal(1, 1000, 1)
    sample = multistep(gaussian, x, sigmas)
    with torch.no_grad():
        assert few_step(student, x, levels[:1]).std() < 0.1 * sample.std()  # D: hardly any spread
    for step in range(300):
        start = levels[0] * normal(8, 8, 1, seed=step + 1)
        loss = distillation_loss(student, gaussian, start, sigmas, [0, 5], sigma_data=STD)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        error = few_step(student, x, levels[:1]) - sample
        again = few_step(student, x, levels[[0, 5]], lambda i: normal(1, 1000, 1, seed=7))
    assert error.abs().max() < 0.02 * sample.std(), error.abs().max()
    assert abs(again.mean() - MEAN) < 0.03 and abs(again.std() / sample.std() - 1) < 0.05
