"""Ensembles: members that are trajectories, one step of all of them at a time.

    z (B, M, N, D) -> generator.step(z, dt, cond, task, noise, inputs) -> z of the next step

The numbers of member m in step k are a function of (seed, trajectory, m, k) alone: neither the
number of processes nor that of members, neither the order of rows nor the device changes a member.
Step 0 is the start, to which a generator may add noise.
"""

import functools
import itertools
import math

import torch

from ups.eval.forecasts import best_plan, latents, rolled_out, start
from ups.rollout import inputs_at, moved_on

ROWS = 4096  # members that go through a network at a time
DRESS = 32   # trajectories on which the size of a dressing is measured
GOLDEN, FIRST, SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9,
                                             0x94D049BB133111EB))


@torch.no_grad()
def roll_out_members(generator, z0, steps, dt, cond, task, noise, scale, inputs=None, rows=ROWS):
    """Yield the members (B, M, N, D) after 1, 2, .. steps from z0 (B, N, D).

    noise(step, count) -> (B, M, count), such as `member_noise` with its first arguments; scale
    (D,): the latents' deviation under white noise of one deviation on the grid. At most `rows`
    members go through a network at a time.
    """
    size = generator.perturbation[task] if generator.perturbation else 0.0
    first = noise(0, math.prod(z0.shape[1:])).unflatten(2, z0.shape[1:])  # (B, M, N, D)
    first = size * scale * (first - first.mean(-2, keepdim=True))  # no mean of a field is moved
    shape, z = first.shape[:2], (z0[:, None] + first).flatten(0, 1)
    dt, cond = (x.repeat_interleave(shape[1], 0) for x in (dt, cond))
    for k in range(1, steps + 1):
        numbers, given = noise(k, generator.numbers(task)).flatten(0, 1), inputs_at(inputs, k - 1)
        given = itertools.repeat(None) if given is None else given.repeat_interleave(
            shape[1], 0).split(rows)
        parts = zip(*(x.split(rows) for x in (z, dt, cond, numbers)), given, strict=False)
        end = torch.cat([generator.step(*part[:3], task, *part[3:]) for part in parts])
        yield end.unflatten(0, shape)
        z = moved_on(z, end)


def member_noise(seed, trajectories, members, device, step, count):
    """Normal numbers (B, M, count) of one step, by hashing (Steele et al. 2014, splitmix64)."""
    key = _mixed(torch.tensor(seed))
    for part in (torch.as_tensor(trajectories).view(-1, 1, 1),
                 torch.arange(members).view(-1, 1), torch.tensor(step)):
        key = _mixed(key + GOLDEN * (part.cpu().long() + 1))
    bits = _mixed(key.to(device) + GOLDEN * torch.arange(1, (count + 1) // 2 + 1, device=device))
    radius = ((bits >> 32 & 0xFFFFFFFF).float() + 0.5).mul(2.0**-32).log().mul(-2).sqrt()
    angle = (bits & 0xFFFFFFFF).float().mul(2 * math.pi * 2.0**-32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)[..., :count]


def _mixed(x):
    """64 bits (int64, products wrap) in which every bit depends on every bit of x"""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x = (x ^ (x >> shift & 2**(64 - shift) - 1)) * factor
    return x ^ (x >> 31 & 2**33 - 1)


def drawn(generator, task, index, members, seed=0):
    """The forecast of a generator: members (B, M, C, *grid) of each lead."""
    def forecast(s):
        noise = functools.partial(member_noise, seed, s.chosen, members, s.z0.device)
        for z in roll_out_members(generator, s.z0, s.steps, s.dt, s.cond, index, noise,
                          task.noise_scale.to(s.z0), s.inputs):
            yield task.decode(z)

    return forecast


def dressed(operator, task, index, members, seed=0):
    """The operator alone, and at every lead Gaussian noise as large as its error on val, channel by
    channel. No member is fed back: a yardstick of what a marginal distribution wins."""
    line = functools.partial(latents, task, index, operator, best_plan(task))

    @functools.cache
    def errors(device):
        chosen = task.fields.split("val")[:DRESS]
        s = start(task, chosen, chosen, device)
        return [(z - task.encode(s.u[:, k])).square().mean((0, 1)).sqrt()
                for k, z in enumerate(line(s), start=1)]

    def forecast(s):
        device = s.z0.device
        for k, (z, size) in enumerate(zip(line(s), errors(device), strict=False), start=1):
            noise = member_noise(seed, s.chosen, members, device, k, math.prod(z.shape[1:]))
            yield task.decode(z[:, None] + size * noise.unflatten(2, z.shape[1:]))

    return forecast


def yardsticks(task, index, operator, perturbed, members, seed=0):
    """Forecasts of the operator and of what an ensemble must beat, which needs no network of its
    own; dressing has the operator's errors on val, of which other data have none."""
    dressing = {} if task.fields.all_test else {
        "dressing": dressed(operator, task, index, members, seed)}
    return {"operator": rolled_out(task, index, operator),
            "perturbed": drawn(perturbed, task, index, members, seed)} | dressing
