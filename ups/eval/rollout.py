"""Roll a latent model out over a split and measure it in physical units.

    u0 -> z0 -> z1_hat -> z2_hat -> ...      decode every frame, compare with the stored solution

Every rank takes its share of the trajectories; the tables of errors are summed, so the numbers do
not depend on the number of processes. All ranks call everything here the same number of times.
"""

import math

import torch
from accelerate.utils import DistributedType
from tqdm import tqdm

from ups.eval.ensemble import inputs_at
from ups.eval.metrics import drift, nrmse
from ups.models.precision import products
from ups.train.step import eager

CHUNK_BYTES = 256 << 20  # of fields that are held at a time
MEASURED = ("operator", "one_step", "persistence", "codec", "drift")


@torch.no_grad()
@products("highest")
def rollout(model, z0, steps, dt, cond, task=0, inputs=None):
    """The predicted latents (B, steps, N, D) that follow `z0` (B, N, D)."""
    frames, z = [], z0
    for k in range(steps):
        z = model(z, dt, cond, task, inputs_at(inputs, k))
        frames.append(z)
    return torch.stack(frames, 1)


def measure(accelerator, model, task, index, split, limit=None):
    """nRMSE of every trajectory and lead time (n, T - 1), for one task of a run.

    `operator` rolls out from the first frame; `one_step` starts from the true frame before;
    `persistence` repeats the first frame; `codec` is the error of encoding and decoding alone;
    `drift` is not an nRMSE but how far conserved means have moved in the roll-out.
    """
    def tables(chosen):
        results = predict(accelerator, model, task, index, chosen)
        return {name: results[name] for name in MEASURED}

    return by_trajectory(accelerator, tables, task.fields.split(split)[:limit],
                         CHUNK_BYTES // trajectory_bytes(task.fields.facts))


def by_trajectory(accelerator, tables, chosen, size, spread=True, title=None):
    """`tables(some of chosen)`, a dictionary of (B, ..), for all of them: (n, ..), on every rank.

    At most `size` trajectories at a time, shared by the ranks, which all call equally often; fewer
    where that keeps all busy (`spread`: rows may then differ by rounding). A forward of FSDP2 is a
    collective, so there all have equally many rows too. `title`: of a bar.
    """
    whole, world = {}, accelerator.num_processes
    sharded = accelerator.distributed_type == DistributedType.FSDP
    size = max(1, min(64, size, -(-len(chosen) // world) if spread else size))
    for first in tqdm(range(0, len(chosen), size * world), title, unit="chunk",
                      disable=title is None or not accelerator.is_main_process):
        start = first + size * accelerator.process_index
        own = chosen[start : start + size]  # of the last ranks fewer, or none
        wanted = min(size, len(chosen) - first) if sharded else 1
        more = chosen[:1].expand(max(0, wanted - len(own)))
        for name, table in tables(torch.cat([own, more])).items():
            if name not in whole:
                shape = len(chosen), *table.shape[1:]
                whole[name] = torch.zeros(shape, dtype=torch.float64)
            whole[name][start : start + size] = table[: len(own)].double().cpu()
    if world > 1:
        for name, table in whole.items():
            table = table.to(accelerator.device)
            whole[name] = accelerator.reduce(table, reduction="sum").cpu()
    return whole


def trajectory_bytes(spec):
    return 4 * spec.frames * len(spec.channels) * math.prod(spec.grid)


@eager
@torch.no_grad()
def predict(accelerator, model, task, index, chosen):
    """Roll out some trajectories: errors by name, and the fields themselves (`truth`, `fields`)."""
    device = accelerator.device
    u = task.fields.read(chosen).to(device)  # (B, T, C, *grid)
    batch, frames = u.shape[:2]
    cond = task.cond(chosen).to(device)
    dt = torch.full((batch,), task.fields.facts.dt, device=device)
    z, inputs = task.encode(u), task.inputs(chosen)  # (B, T, N, D)
    rolled = task.decode(rollout(model, z[:, 0], frames - 1, dt, cond, index, inputs))
    steps = [model(z[:, t], dt, cond, index, inputs_at(inputs, t)) for t in range(frames - 1)]
    forecasts = {"operator": rolled, "one_step": task.decode(torch.stack(steps, 1)),
                 "persistence": u[:, :1].expand_as(rolled), "codec": task.decode(z[:, 1:])}
    return {name: nrmse(p, u[:, 1:]).cpu()
            for name, p in forecasts.items()} | {
            "drift": drift(rolled, u[:, 0], task.conserved).cpu(),
            "truth": u, "fields": torch.cat([u[:, :1], rolled], 1)}
