"""The forecasts that an evaluation compares, of one task.

A forecast is a generator that yields, for lead 1, 2, .., members (B, M, C, *grid) in physical
units; one member where it is no ensemble:

    persistence   the first frame                mean       of training trajectories, at each lead
    codec         decode(encode(truth))          one_step   from the true frame before
    operator      rolled out from the start
    diffusion, consistency                       operator and corrector, an ensemble
    shuffled, shifted, halved                    the operator as a probe: with the parameters of
                                                 another trajectory; on circularly shifted fields,
                                                 shifted back; in twice as many steps of dt / 2
"""

from types import SimpleNamespace

import torch

from ups.eval.ensemble import corrected, inputs_at, member_noise

LABELS = {"operator": "operator", "diffusion": "+ corrector",
          "consistency": "+ student", "persistence": "persistence", "mean": "training mean",
          "codec": "codec floor", "one_step": "one true step", "shuffled": "shuffled parameter",
          "shifted": "circular shift", "halved": "halved dt"}
ENSEMBLES = ("diffusion", "consistency")
PROBES = ("shuffled", "shifted", "halved")
YARDSTICKS = ("persistence", "mean", "codec", "one_step")
MEAN_OF = 256  # training trajectories


def make_forecasts(task, index, operator, correctors, seed=0):
    """Generators by name. `correctors`: {stage: (corrector, members, calls, correct_every)}."""
    spec, average = task.fields.facts, training_mean(task)
    free = [axis for axis, name in enumerate(spec.axes, 3 - len(spec.axes)) if name in spec.shifts]

    def rolled(z, dt, cond, inputs, steps, parts=1):
        for k in range(steps):
            for _ in range(parts):
                z = operator(z, dt / parts, cond, index, inputs_at(inputs, k))
            yield task.decode(z[:, None])

    def shifted(s):
        axes = list(range(-len(spec.grid), 0))
        moves = [n // 3 + 1 if axis + 3 in free else 0
                 for n, axis in zip(spec.grid, axes, strict=True)]  # as a rule, no whole tokens
        z0, inputs = task.encode(s.u[:, 0].roll(moves, axes)), None
        if s.inputs is not None:
            v = task.codec.decode_inputs(s.inputs.flatten(0, 1)).roll(moves, axes)
            inputs = task.codec.encode_inputs(v).unflatten(0, s.inputs.shape[:2])
        for p in rolled(z0, s.dt, s.cond, inputs, s.steps):
            yield p.roll([-n for n in moves], axes)

    def ensemble(stage):
        corrector, members, calls, every = correctors[stage]

        def draw(s):
            noise = member_noise(seed, s.chosen, members, 2, *s.z0.shape[1:]).to(s.z0)
            for _, z in corrected(operator, corrector, s.z0, s.steps, s.dt, s.cond, index, noise,
                                  calls, every, inputs=s.inputs):
                yield task.decode(z)
        return draw

    forecasts = {
        "persistence": lambda s: (s.u[:, :1] for _ in range(s.steps)),
        "mean": lambda s: (average[None, None, k].to(s.u).expand_as(s.u[:, :1])
                           for k in range(1, s.steps + 1)),
        "codec": lambda s: (task.decode(task.encode(s.u[:, k:k + 1]))
                            for k in range(1, s.steps + 1)),
        "one_step": lambda s: (
            task.decode(operator(task.encode(s.u[:, k]), s.dt, s.cond, index,
                                 inputs_at(s.inputs, k))[:, None])
            for k in range(s.steps)),
        "operator": lambda s: rolled(s.z0, s.dt, s.cond, s.inputs, s.steps),
    }
    forecasts |= {stage: ensemble(stage) for stage in correctors}
    if any(scale.low < scale.high for scale in spec.scales):
        forecasts["shuffled"] = lambda s: rolled(s.z0, s.dt, s.other, s.inputs, s.steps)
    if free:
        forecasts["shifted"] = shifted
    if spec.frames > 2:
        forecasts["halved"] = lambda s: rolled(s.z0, s.dt, s.cond, s.inputs, s.steps, 2)
    return forecasts


def training_mean(task):
    """The mean trajectory (T, C, *grid) of some training trajectories."""
    chosen = task.fields.split("train")
    chosen = chosen[:: -(-len(chosen) // MEAN_OF)]
    return sum(task.fields.read([i])[0].double() for i in chosen).div(len(chosen)).float()


def start(task, chosen, test, device):
    """What forecasts may know of the trajectories `chosen` from `test`."""
    u = task.fields.read(chosen).to(device)  # (B, T, C, *grid)
    place = {int(i): k for k, i in enumerate(test)}
    other = test.roll(1)[[place[int(i)] for i in chosen]]  # has the next parameters of a family
    return SimpleNamespace(
        u=u, chosen=chosen, steps=u.shape[1] - 1, z0=task.encode(u[:, 0]),
        cond=task.cond(chosen).to(device), other=task.cond(other).to(device),
        inputs=task.inputs(chosen), dt=torch.full((len(u),), task.fields.facts.dt, device=device))
