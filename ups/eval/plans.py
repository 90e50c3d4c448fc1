"""What the plans of a roll-out (ups/rollout.py) err and take.

The stage of an operator measures them on the validation split when it ends, and leaves

    choices.json   {task: {"plans": {longest stride: nRMSE of the frames 1, 2, ..}}}

which is no part of its fingerprint: a Simulator and an evaluation choose by it.
"""

import functools
import math

import torch

from ups.eval.forecasts import planned, start
from ups.eval.measure import CHUNK_BYTES, measure
from ups.eval.metrics import nrmse
from ups.rollout import roll_out, within
from ups.train.ranks import now
from ups.train.step import exact_inference

ROWS = 64  # trajectories that are timed together


def choose(run, model, tasks):
    """Measure the plans of every task, and write them down. Every rank calls."""
    choices = {}
    for index, task in enumerate(tasks):
        chosen = task.fields.split("val")[: run.cfg.val_trajectories]
        task.plans = dict.fromkeys(task.strides)
        forecasts = {longest: functools.partial(_forecast, task, index, model, longest)
                     for longest in task.strides}
        tables, _ = measure(run.accelerator, task, forecasts, chosen, only=("nrmse",))
        errors = {n: tables[n]["nrmse"].nanmean((0, 2)) for n in task.strides}
        task.plans = {n: [e if math.isfinite(e) else 1e30 for e in error.tolist()]
                      for n, error in errors.items()}
        choices[task.name] = {"plans": task.plans}
    if run.accelerator.is_main_process:
        run.write("choices.json", choices)


def _forecast(task, index, model, longest, s):
    return planned(task, index, model, longest, s.z0, s.dt, s.cond, s.inputs, s.steps)


@exact_inference
@torch.no_grad()
def plan_rows(accelerator, task, index, operator, test):
    """For each plan the error and the seconds of a trajectory, to all frames and to the last."""
    facts, rows = task.fields.facts, []
    most = CHUNK_BYTES // (4 * len(facts.channels) * math.prod(facts.grid) * facts.frames)
    s = start(task, test[:max(1, min(ROWS, most))], test, accelerator.device)
    for longest in task.plans:
        row = {"longest": longest}
        for name, leads in (("all", range(1, s.steps + 1)), ("last", [s.steps])):
            for _ in range(2):  # the first one warms up
                begin, frames = now(), {}
                z0 = task.encode(s.u[:, 0])
                for lead, z in roll_out(operator, z0, s.dt, s.cond, index, leads,
                                        within(task.plans, longest), s.inputs):
                    frames[lead] = task.decode(z)
                seconds = now() - begin
            u = torch.stack([frames[lead] for lead in leads], 1)
            row |= {f"nrmse_{name}": nrmse(u, s.u[:, list(leads)]).mean().item(),
                    f"seconds_{name}": seconds / len(s.u)}
        rows.append(row)
    if accelerator.is_main_process:
        print(f"\n{task.name}: nRMSE and seconds of a trajectory, {len(s.u)} together, by the "
              f"longest step\n{'frames':>9}{'all frames':>23}{f'frame {s.steps}':>23}")
        for row in rows:
            print(f"{row['longest']:9}" + "".join(
                f"{row[f'nrmse_{name}']:12.2e}{row[f'seconds_{name}']:9.2e} s"
                for name in ("all", "last")))
    return rows
