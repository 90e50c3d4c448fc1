"""Forecasts: each is a function of `start`, what it may know of some trajectories, and yields for
lead 1, 2, .. its members (B, M, C, *grid) in physical units; one member where it is no ensemble:

    persistence   the first frame                mean       of training trajectories, at each lead
    codec         decode(encode(truth))          one_step   from the true frame before
    operator      rolled out from the start
    shuffled, shifted       the operator as a probe: with the parameters of another trajectory; on
                            circularly shifted fields, shifted back
"""

import dataclasses
import functools
from types import SimpleNamespace

import torch

from ups.rollout import choose_plan, inputs_at, roll_out, within

LABELS = {"operator": "operator", "ensemble": "ensemble", "diffusion": "diffusion",
          "consistency": "its student", "perturbed": "perturbed input",
          "dressing": "dressing, no network",
          "persistence": "persistence", "mean": "training mean", "codec": "codec floor",
          "members": "mean of members", "alone": "mean alone", "law": "train mean, scaled",
          "one_step": "one true step", "shuffled": "shuffled parameter",
          "shifted": "circular shift"}
PROBES = ("shuffled", "shifted")
MEAN_OF = 256  # training trajectories


def make_forecasts(task, index, operator):
    """Forecasts by name, without ensembles: those are made where they are drawn."""
    facts, own = task.fields.facts, rolled_out(task, index, operator)
    shifts = [axis in (facts.shifts or ()) for axis in facts.axes]

    def shifted(s):
        axes = list(range(-len(facts.grid), 0))
        moves = [n // 3 + 1 if free else 0  # as a rule, no whole tokens
                 for n, free in zip(facts.grid, shifts, strict=True)]
        z0, inputs = task.encode(s.whole[:, :task.history].roll(moves, axes)).squeeze(1), None
        if s.inputs is not None:
            v = task.codec.decode_inputs(s.inputs.flatten(0, 1)).roll(moves, axes)
            inputs = task.encode_inputs(v.unflatten(0, s.inputs.shape[:2]))
        for p in own(s, z0=z0, inputs=inputs):
            yield p.roll([-n for n in moves], axes)

    def one_step(s):
        for k in range(s.steps):
            z0 = task.encode(s.whole[:, k : k + task.history]).squeeze(1)
            z = operator(z0, s.dt, s.cond, index, inputs_at(s.inputs, k))
            yield task.decode(z[:, None])

    @functools.cache
    def average():
        chosen = task.fields.split("train")
        chosen = chosen[:: -(-len(chosen) // MEAN_OF)]
        return sum(task.fields.read([i])[0].double() for i in chosen).div(len(chosen)).float()

    def mean(s):
        for frame in average()[task.history:]:  # (C, *grid)
            yield frame.to(s.u).expand_as(s.u[:, :1])

    forecasts = {"persistence": lambda s: (s.u[:, :1] for _ in range(s.steps)),
                 "codec": lambda s: (task.decode(task.encode(s.u[:, k:k + 1]))
                                     for k in range(1, s.steps + 1)),
                 "mean": mean, "one_step": one_step, "operator": own}
    if not len(task.fields.split("train")):  # data that no training saw
        del forecasts["mean"]
    if any(scale.low < scale.high for scale in facts.scales):
        forecasts["shuffled"] = lambda s: own(s, cond=s.other)
    if any(shifts):
        forecasts["shifted"] = shifted
    return forecasts


def rolled_out(task, index, operator):
    """The forecast of an operator by its most accurate plan."""
    return functools.partial(planned, task, index, operator, best_plan(task))


def best_plan(task):
    return choose_plan(task.plans, range(1, task.fields.facts.frames))


def planned(task, index, operator, longest, s, **other):
    """Fields (B, 1, C, *grid) of frame 1, 2, .. from a start, or one that is other in something,
    by the plan `longest`: ups/rollout.py."""
    s = SimpleNamespace(**vars(s) | other)
    for z in latents(task, index, operator, longest, s):
        yield task.decode(z[:, None])


def latents(task, index, operator, longest, s):
    """The latents (B, N, D) of these fields."""
    waiting, lead = {}, 1
    for frame, z in roll_out(operator, s.z0, s.dt, s.cond, index, range(1, s.steps + 1),
                             within(task.plans, longest), s.inputs):
        waiting[frame] = z
        while lead in waiting:
            yield waiting.pop(lead)
            lead += 1


def scored(task):
    """The facts of what is scored: the last frame that is given, and those after it."""
    facts = task.fields.facts
    return dataclasses.replace(facts, frames=facts.frames - task.history + 1)


def start(task, chosen, test, device):
    """What forecasts may know of the trajectories `chosen` from `test`."""
    u, given = task.fields.read(chosen).to(device), task.history  # (B, T, C, *grid)
    inputs = task.inputs(chosen)  # (B, T or 1, N, E)
    inputs = inputs if inputs is None or inputs.shape[1] == 1 else inputs[:, given - 1:]
    place = {int(i): k for k, i in enumerate(test)}
    other = test.roll(1)[[place[int(i)] for i in chosen]]  # has the next parameters of a family
    return SimpleNamespace(
        whole=u, u=u[:, given - 1:], chosen=chosen, steps=u.shape[1] - given,
        z0=task.encode(u[:, :given]).squeeze(1),
        cond=task.cond(chosen).to(device), other=task.cond(other).to(device),
        inputs=inputs, dt=torch.full((len(u),), task.fields.facts.dt, device=device))
