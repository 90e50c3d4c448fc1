"""Diffusion and consistency models as pure functions, for data of about unit variance.

Blurred data lie on a quarter circle, from the data at t = 0 to noise alone at t = pi / 2:

    y = cos(t) clean + sin(t) noise        dy / dt = -v        v = sin(t) clean - cos(t) noise

A network net(y, c_noise) estimates the mean of v given y; along that slope, the probability flow,
the distribution at each t is right. This is EDM (Karras et al. 2022) with sigma = tan(t), y its
c_in x and net its raw network, whose input and target have unit variance; the angle is that of
TrigFlow (Lu & Song 2024). Of data that are N(0, 1) the mean of v is zero: the flow stands still,
and a sampler is exact in any number of calls. A network of zeros draws white noise.

A consistency function (Song et al. 2023) jumps along the flow to t = 0, by a network of the mean
slope on the way: f(y, t) = y + t net(y, c_noise), one step of the sampler, so that a student starts
from the weights of its teacher.

Tensors are (B, ...), mostly (B, N, D); angles (B,). No function draws a random number: normal
numbers are given, so that they can be a function of the seed.
"""

import itertools
import math

import torch

STEEPNESS = 2.5  # of the angles of a sampler: small steps where narrow data still turn
LAST = math.atan(10.0)  # a network hardly ever trains on larger angles: it takes them for this one


def training_angle(normal, mean, std):
    """Angles (B,) from normal numbers (B,), with log-normal noise levels tan(t)."""
    return torch.exp(mean + std * normal).atan()


def denoising_loss(net, clean, angle, noise, weight=None):
    """Squared error (B,) of v, of order one at any angle.

    `weight` (D,) is that of the channels, None weighs all alike; or a function, from the error to
    (B,).
    """
    angles = angle.view(-1, *[1] * (clean.ndim - 1))
    cos, sin = angles.cos(), angles.sin()
    error = net(cos * clean + sin * noise, c_noise(angle)) - (sin * clean - cos * noise)
    return _mean_square(error, weight)


def c_noise(angle):
    """What a network is told of an angle (B,): log(sigma) / 4."""
    return angle.clamp(max=LAST).tan().log() / 4


# sampling

def angles(calls):
    """Angles (calls + 1,) from pi / 2 down to 0."""
    return math.pi / 2 * torch.linspace(1, 0, calls + 1, dtype=torch.float64) ** STEEPNESS


def multistep(net, y, angles, path=None):
    """Sample from noise y (B, ...) at angles[0], with one call a step (Adams and Bashforth's second
    rule: the slope of v comes from the call before). A list `path` takes up y at each angle but the
    last."""
    path, before, last = [] if path is None else path, None, 1.0
    for t, after in itertools.pairwise(angles.tolist()):
        path.append(y)
        v, step = _call(net, y, t), t - after
        y = y + step * (v if before is None else v + step / last / 2 * (v - before))
        before, last = v, step
    return y


def few_step(net, y, angles, noise=None):
    """Sample from noise y (B, ...) by a student, one call for each of `angles`, the first pi / 2.

    Between two calls y is blurred again by noise(i), i >= 1 (Song et al. 2023, algorithm 1).
    """
    for i, t in enumerate(angles.tolist()):
        y = math.cos(t) * y + math.sin(t) * noise(i) if i else y
        y = y + t * _call(net, y, t)
    return y


def distillation_loss(student, teacher, y, angles, at, weight=None):
    """Squared distance (B,) of the student's jumps to where the teacher's trajectory ends, over t:
    so it is of order one.

    y (B, ...) is noise; the student jumps from the angles `at` (indices), which are those that it
    will be called at. The teacher carries no gradient. In consistency distillation the student
    chases its own average from level to level, and errors add up; here every jump has the true end
    as target.
    """
    path = []
    with torch.no_grad():
        goal = multistep(teacher, y, angles, path)
    loss = 0.0
    for i in at:
        t = angles[i].item()
        loss = loss + _mean_square(_call(student, path[i], t) - (goal - path[i]) / t, weight)
    return loss / len(at)


def _call(net, y, t):
    """With one angle for all rows, made on their device: a CUDA graph may not copy it there."""
    return net(y, c_noise(y.new_full((len(y),), t)))


def _mean_square(error, weight):
    """(B, N, D) -> (B,), channels weighed by weight (D,), or what weight(error) is"""
    if callable(weight):
        return weight(error)
    weight = error.new_ones(error.shape[-1]) if weight is None else weight
    return (weight * error**2).mean(1).sum(-1) / weight.sum()
