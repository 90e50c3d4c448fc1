"""What the plans of a roll-out (ups/rollout.py) err and take.

The stage of an operator measures them on the validation split when it ends, and leaves

    choices.json   {task: {"plans": {longest stride: nRMSE of the frames 1, 2, ..},
                           "precision": of roll-outs on a GPU}}

which is no part of its fingerprint: a Simulator and an evaluation choose by it.
"""

import functools
import math

import torch

from ups.eval.forecasts import planned, start
from ups.eval.measure import CHUNK_BYTES, measure, text_table
from ups.eval.metrics import nrmse
from ups.models.precision import PRODUCTS, lowered, products
from ups.rollout import choose_plan, roll_out, within
from ups.train.ranks import now
from ups.train.step import exact_inference

ROWS = 64     # trajectories that are timed together
SLACK = 1.02  # largest error of a roll-out in a lower precision / the exact one


def choose(run, model, tasks):
    """Measure the plans of every task, and write them down. Every rank calls."""
    choices = {}
    for index, task in enumerate(tasks):
        chosen = task.fields.split("val")[: run.cfg.val_trajectories]
        task.plans = dict.fromkeys(task.strides)
        forecasts = {n: functools.partial(planned, task, index, model, n) for n in task.strides}
        tables, _ = measure(run.accelerator, task, forecasts, chosen, only=("nrmse",))
        for n, table in tables.items():
            task.plans[n] = table["nrmse"].nanmean((0, 2)).nan_to_num(1e30, 1e30).tolist()
        choices[task.name] = {"plans": task.plans}
        if run.accelerator.device.type == "cuda":
            own = run.accelerator.unwrap_model(model)
            choices[task.name]["precision"] = choose_precision(run.accelerator, task, index, own,
                                                               chosen)
    if run.accelerator.is_main_process:
        run.write("choices.json", choices)


def _rounded(precision, *args):
    with products(PRODUCTS[precision]):
        return list(planned(*args))


def choose_precision(accelerator, task, index, model, chosen):
    """The fastest precision that a roll-out bears, by the most accurate plan."""
    longest = choose_plan(task.plans, range(1, task.fields.facts.frames))
    if not hasattr(getattr(model, "body", None), "lower") or hasattr(model, "reshard"):
        return "float32"  # a model of your own, or one that FSDP2 has cut
    forecasts = {name: functools.partial(_rounded, name, task, index, lowered(model, name), longest)
                 for name in PRODUCTS}
    tables, _ = measure(accelerator, task, forecasts, chosen, only=("nrmse",))
    errors = {name: table["nrmse"].nanmean().item() for name, table in tables.items()}
    fits = [name for name in PRODUCTS if errors[name] <= SLACK * errors["float32"]] or ["float32"]
    told = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    if accelerator.is_main_process:
        print(f"{task.name}: roll-outs on a GPU in {fits[0]} (nRMSE of the val split: {told}).")
    return fits[0]


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
                z0 = task.encode(s.whole[:, :task.history]).squeeze(1)
                for lead, z in roll_out(operator, z0, s.dt, s.cond, index, leads,
                                        within(task.plans, longest), s.inputs):
                    frames[lead] = task.decode(z)
                seconds = now() - begin
            u = torch.stack([frames[lead] for lead in leads], 1)
            row |= {f"nrmse_{name}": nrmse(u, s.u[:, list(leads)]).mean().item(),
                    f"seconds_{name}": seconds / len(s.u)}
        rows.append(row)
    if accelerator.is_main_process:
        print(text_table(f"{task.name}: nRMSE and seconds of a trajectory, {len(s.u)} together, "
                         "by the longest step in frames",
                         ["all frames", "seconds", f"frame {s.steps}", "seconds"],
                         {longest: values for longest, *values in map(dict.values, rows)}))
    return rows
