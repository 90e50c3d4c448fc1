"""Samplers and losses against distributions whose network and flow are known in closed form."""

import itertools
import math

import pytest
import torch

from ups.models.diffusion import (
    LAST,
    angles,
    denoising_loss,
    distillation_loss,
    few_step,
    multistep,
    training_angle,
)

MEAN, STD = 0.7, 0.5                                     # a Gaussian
CENTRES, SHARES, WIDTH = (-1.2, 0.8), (0.4, 0.6), 0.25   # a mixture of two


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def angle_of(c_noise):
    return torch.exp(4 * c_noise).atan()


def over(s, y):
    return s.view(-1, *[1] * (y.ndim - 1))


def gaussian(y, c_noise, mean=MEAN, std=STD):
    """The mean of v given y, of a Gaussian."""
    cos, sin = (over(f(angle_of(c_noise)), y) for f in (torch.cos, torch.sin))
    variance = (cos * std) ** 2 + sin**2
    return mean * sin + (std**2 - 1) * sin * cos / variance * (y - mean * cos)


def gaussian_flow(y, angle, mean=MEAN, std=STD):
    """Where the flow carries y from an angle to 0."""
    return mean + std * (y - mean * math.cos(angle)) / math.hypot(std * math.cos(angle),
                                                                  math.sin(angle))


def mixture(y, c_noise):
    """The mean of v given y, of the mixture."""
    cos, sin = (over(f(angle_of(c_noise)), y)[..., None] for f in (torch.cos, torch.sin))
    variance, apart = (cos * WIDTH) ** 2 + sin**2, y[..., None] - cos * y.new_tensor(CENTRES)
    share = torch.softmax(y.new_tensor(SHARES).log() - apart**2 / (2 * variance), -1)
    clean = y.new_tensor(CENTRES) + WIDTH**2 * cos / variance * apart
    return (share * (clean - cos * y[..., None]) / sin).sum(-1)


def mixture_quantiles(p, angle):
    """y with P(Y < y) = p, by bisection; a flow in one dimension keeps every point's p."""
    lo, hi = torch.full_like(p, -50.0), torch.full_like(p, 50.0)
    cos, width = math.cos(angle), math.hypot(math.cos(angle) * WIDTH, math.sin(angle))
    for _ in range(80):
        x = (lo + hi) / 2
        below = sum(w * torch.special.ndtr((x - cos * m) / width)
                    for w, m in zip(SHARES, CENTRES, strict=True)) < p
        lo, hi = torch.where(below, x, lo), torch.where(below, hi, x)
    return x


def midpoints(count):
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count).view(1, -1, 1)


def wasserstein(x, quantiles):
    return (x.flatten().sort()[0] - quantiles.flatten()).abs().mean()


# training

@pytest.mark.parametrize("angle", [0.002, 0.3, 1.0, 1.57])
def test_input_and_target_of_the_network_have_unit_variance(angle):
    """So a network that answers zero, as at the start, has a loss of one at every angle."""
    clean, noise = normal(200_000, 1, 1), normal(200_000, 1, 1, seed=1)
    inputs, levels = [], []

    def net(y, c_noise):
        inputs.append(y)
        levels.append(c_noise)
        return 0 * y

    loss = denoising_loss(net, clean, torch.full((200_000,), angle), noise)
    assert loss.shape == (200_000,) and abs(loss.mean() - 1) < 0.02
    assert abs(inputs[0].var() - 1) < 0.02
    assert levels[0][0].item() == pytest.approx(math.log(math.tan(min(angle, LAST))) / 4)


def test_training_levels_are_log_normal():
    log = training_angle(normal(100_000), -1.2, 1.4).tan().log()
    assert abs(log.mean() + 1.2) < 0.02 and abs(log.std() - 1.4) < 0.02


@pytest.mark.parametrize("angle", [0.1, 0.5, 1.3])
def test_the_minimiser_of_the_loss_is_the_mean_given_y(angle):
    """Two points of data times two of noise have the moments of Gaussians, which is all that a
    linear network can see: its best fit, found by Newton's step, is the mean of v given y."""
    clean = torch.tensor([MEAN - STD, MEAN + STD], dtype=torch.float64).repeat(2).view(4, 1, 1)
    noise = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64).view(4, 1, 1)
    angle = torch.full((4,), angle, dtype=torch.float64)

    def loss(w):
        return denoising_loss(lambda y, c: w[0] * y + w[1], clean, angle, noise).mean()

    def slope(*w):
        w = torch.tensor(w, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(loss(w), w)[0]

    first = slope(0, 0)
    w = -torch.linalg.solve(torch.stack([slope(1, 0), slope(0, 1)], 1) - first[:, None], first)
    y = normal(4, 1, 1)
    torch.testing.assert_close(w[0] * y + w[1], gaussian(y, angle.tan().log() / 4))
    variance = (angle[0].cos() * STD) ** 2 + angle[0].sin() ** 2
    torch.testing.assert_close(loss(w), STD**2 / variance)


def test_the_weights_of_channels():
    clean, noise, angle = normal(2, 5, 3), normal(2, 5, 3, seed=1), normal(2).exp().atan()
    weight = torch.tensor([1.5, 0.5, 0.0], dtype=torch.float64)

    def wrong(y, c):
        cos, sin = over(angle.cos(), y), over(angle.sin(), y)
        return y.new_tensor([1.0, 2.0, 1e6]) + sin * clean - cos * noise

    loss = denoising_loss(wrong, clean, angle, noise, weight)
    torch.testing.assert_close(loss, loss.new_tensor([1.75, 1.75]))  # (1.5 * 1 + 0.5 * 4) / 2
    zero = denoising_loss(wrong, clean, angle, noise, lambda error: error[:, 0, 1] ** 2)
    torch.testing.assert_close(zero, loss.new_tensor([4.0, 4.0]))


# sampling

def told(calls):
    """Angles from the largest one that a network is told."""
    return angles(calls) * LAST / (math.pi / 2)


@pytest.mark.parametrize("net", [gaussian, mixture])
def test_samplers_follow_the_flow_at_second_order(net):
    p, errors = midpoints(2000), []
    y, exact = (mixture_quantiles(p, t) for t in (LAST, 0.0))
    if net is gaussian:
        y = torch.special.ndtri(p)
        exact = gaussian_flow(y, LAST)
    for calls in (16, 32, 64, 128):
        x = multistep(net, y, told(calls))
        errors.append((x - exact).abs().mean().item())
    found = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert all(1.6 < order < 2.7 for order in found) and errors[-1] < 1e-3, (found, errors)


def test_noise_alone_is_a_good_start():
    """A network takes the first angle for one at which data still show: that costs little."""
    x = multistep(mixture, torch.special.ndtri(midpoints(2000)), angles(64))
    assert abs(x.mean()) < 5e-3                        # 0.4 * -1.2 + 0.6 * 0.8 = 0
    assert abs(x.var() - (0.96 + WIDTH**2)) < 2e-2     # 0.4 * 1.44 + 0.6 * 0.64 = 0.96


def spread(calls, std):
    def net(y, c_noise):
        return gaussian(y, c_noise, 0.0, std)

    return multistep(net, torch.ones(1, 1, 1, dtype=torch.float64), angles(calls)).item() / std


@pytest.mark.parametrize("calls", [1, 2, 8, 50])
def test_data_of_unit_variance_keep_it_in_any_number_of_calls(calls):
    assert spread(calls, 1.0) == pytest.approx(1, abs=1e-12)


def test_eight_calls_find_the_spread_of_narrower_data():
    """The deviation in closed form: 1 % where it is half as large, 11 % at a tenth."""
    assert [spread(8, std) for std in (0.7, 0.5, 0.3, 0.1)] == pytest.approx(
        [0.997, 0.988, 0.966, 0.893], abs=2e-3)


# consistency

def jump(y, c_noise):
    """The mean slope of the Gaussian's flow on the way to 0."""
    angle = angle_of(c_noise[0]).item()
    return (gaussian_flow(y, angle) - y) / angle


def test_the_exact_jump_is_a_fixed_point():
    """Only the sampler's error is left, second order: the loss, its square, falls by 16."""
    y = normal(64, 8, 1)

    def loss(net, calls):
        value = distillation_loss(net, gaussian, y, told(calls), [0, calls // 2])
        assert value.shape == (64,)
        return value.mean().item()

    exact = [loss(jump, n) for n in (16, 32, 64)]
    assert exact[1] < 1e-5 and 8 < exact[0] / exact[1] < 40 and 8 < exact[1] / exact[2] < 40
    assert loss(gaussian, 32) > 100 * exact[1]              # the slope itself is not its mean


def test_the_teacher_has_no_gradient_and_the_weight_is_used():
    y = normal(2, 4, 2)
    a, b = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = distillation_loss(lambda y, s: a * y, lambda y, s: b * gaussian(y, s), y, angles(4),
                             [0, 2], weight=y.new_tensor([1.0, 0.0]))
    loss.sum().backward()
    assert b.grad is None and a.grad[0] != 0 and a.grad[1] == 0


def test_few_steps_of_the_exact_jump_give_the_distribution():
    y, seen = torch.special.ndtri(midpoints(50_000)), []
    exact = MEAN + STD * y

    def net(y, c_noise):
        return (exact - y) / (math.pi / 2) if c_noise[0] > 0.57 else jump(y, c_noise)

    def noise(i):
        seen.append(i)
        return normal(1, 50_000, 1, seed=i)

    one = few_step(net, y, angles(8)[:1])
    torch.testing.assert_close(one, exact)
    three = few_step(net, y, angles(8)[[0, 3, 5]], noise)
    assert seen == [1, 2] and wasserstein(three, exact) < 0.01 and (three - one).abs().mean() > 0.1
