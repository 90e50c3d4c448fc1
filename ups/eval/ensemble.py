"""Ensembles: many possible futures of one initial state, a frame at a time.

    corrected   the operator rolls out alone; at every `correct_every`-th lead each member is drawn
                anew from p(z_k | z_hat_{k-1}, z_hat_k, k); between them the operator carries it on
    perturbed   the cheap alternative: the operator from initial states with white noise

A drawn member never enters the operator's own line. It is the truth plus an error of its own, as
large as the operator's: corrected again, both would count, and the variance would double with every
correction. The operator's own error after k steps is what the corrector was trained on.
"""

import itertools

import torch

from ups.eval.forecasts import inputs_at

ROWS = 4096  # members that go through a network at a time, where nothing else is said


@torch.no_grad()
def corrected(operator, corrector, z0, steps, dt, cond, task, noise, calls, correct_every=1,
              leads=None, rows=ROWS, inputs=None, **how):
    """Yield (k, members (B, M, N, D)) for k = 1 .. steps, or for those of `leads` alone.

    noise: (B, M, 2, N, D) normal numbers, the same at every lead, so that the frames of a member
    belong together. At most `rows` members go through a network at a time. `inputs`: tokens
    (B, T or 1, N, E) of the channels that are given, if any.
    """
    size = noise.shape[:2]
    state, members = z0, _members(z0, size[1])
    flat = [_members(x, size[1]) for x in (dt, cond)]

    def step(z, dt, cond, x):
        return operator(z, dt, cond, task, x)

    def draw(z0, z1_hat, lead, dt, cond, noise, x):
        return corrector.draw(z0, z1_hat, lead, dt, cond, noise, task, calls, inputs=x, **how)

    for k in range(1, steps + 1):
        given = inputs_at(inputs, k - 1)
        before, state = state, operator(state, dt, cond, task, given)
        wanted, given = leads is None or k in leads, _members(given, size[1])
        if k % correct_every:
            members = _by_rows(step, rows, members, *flat, given)
        elif wanted or correct_every > 1:
            lead = torch.full_like(flat[0], k, dtype=torch.long)
            members = _by_rows(draw, rows, _members(before, size[1]), _members(state, size[1]),
                               lead, *flat, noise.flatten(0, 1), given)
        if wanted:
            yield k, members.unflatten(0, size)


@torch.no_grad()
def perturbed(operator, z0, steps, dt, cond, task, noise, size, leads=None, inputs=None):
    """Yield (k, members) as `corrected` does, from z0 + size * noise (B, M, N, D)."""
    members = (z0[:, None] + size * noise).flatten(0, 1)
    flat = [_members(x, noise.shape[1]) for x in (dt, cond)]
    for k in range(1, steps + 1):
        given = _members(inputs_at(inputs, k - 1), noise.shape[1])
        members = _by_rows(lambda z, dt, cond, x: operator(z, dt, cond, task, x), ROWS, members,
                           *flat, given)
        if leads is None or k in leads:
            yield k, members.unflatten(0, noise.shape[:2])


def member_noise(seed, trajectories, *shape):
    """Normal numbers (B, *shape): a function of seed and trajectory alone."""
    draws = [torch.randn(shape, generator=torch.Generator().manual_seed(seed * 1_000_003 + int(n)))
             for n in trajectories]
    return torch.stack(draws)


def _members(x, count):
    """(B, ...) -> (B * count, ...): each row `count` times"""
    return None if x is None else x.repeat_interleave(count, 0)


def _by_rows(function, rows, *tensors):
    """`function` of `rows` rows at a time: memory, not science."""
    parts = [itertools.repeat(None) if x is None else x.split(rows) for x in tensors]
    return torch.cat([function(*part) for part in zip(*parts, strict=False)])
