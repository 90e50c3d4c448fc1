"""What a stage of an operator or a generator chooses on the validation split, and leaves in

    choices.json   {task: {"plans": {longest stride: nRMSE of the frames 1, 2, ..},
                           "precision": of roll-outs on a GPU,
                           "perturbation": of a first state, "strength": of a step's noise,
                           "crps_ratio": the score of a generator}}

which is no part of its fingerprint: a Simulator and an evaluation choose by it. The score is a
generator's CRPS as a share of the operator's absolute error, so that a run can say which one to
prefer. Plans: ups/rollout.py. Every rank calls.
"""

import functools
import math

from ups.eval.ensemble import drawn
from ups.eval.forecasts import best_plan, planned, rolled_out
from ups.eval.measure import measure
from ups.files import read_json, write_json
from ups.models.precision import PRODUCTS, lowered, products

SLACK = 1.02  # largest error of a roll-out in a lower precision / the exact one
SIZES = (0.001, 0.003, 0.01, 0.03, 0.1)  # of perturbed inputs, in deviations of a field
STRENGTHS = (1.0, 0.7, 0.5, 0.35, 0.2)  # of a step's noise: less where all steps err alike
VAL, MEMBERS = 16, 4  # trajectories and members that choose: cheap, and fair for any number


def choose_plans(run, model, tasks):
    """Measure the plans of every task, and write them down."""
    choices = {}
    for index, task in enumerate(tasks):
        chosen = task.fields.split("val")[: run.cfg.val_trajectories]
        task.plans = dict.fromkeys(task.strides)
        forecasts = {n: functools.partial(planned, task, index, model, n) for n in task.strides}
        tables = measure(run.accelerator, task, forecasts, chosen, only=("nrmse",))
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
    longest = best_plan(task)
    if not hasattr(getattr(model, "body", None), "lower") or hasattr(model, "reshard"):
        return "float32"  # a model of your own, or one that FSDP2 has cut
    forecasts = {name: functools.partial(_rounded, name, task, index, lowered(model, name), longest)
                 for name in PRODUCTS}
    tables = measure(accelerator, task, forecasts, chosen, only=("nrmse",))
    errors = {name: table["nrmse"].nanmean().item() for name, table in tables.items()}
    fits = [name for name in PRODUCTS if errors[name] <= SLACK * errors["float32"]] or ["float32"]
    told = ", ".join(f"{name} {error:.3g}" for name, error in errors.items())
    if accelerator.is_main_process:
        print(f"{task.name}: roll-outs on a GPU in {fits[0]} (nRMSE of the val split: {told}).")
    return fits[0]


# generators
def val_score(accelerator, operator, generator, task, index):
    """CRPS on val as a share of the operator's absolute error, mean over the leads."""
    forecasts = {"operator": rolled_out(task, index, operator),
                 "ensemble": drawn(generator, task, index, MEMBERS)}
    tables = measure(accelerator, task, forecasts, task.fields.split("val")[:VAL], only=("crps",),
                     members=MEMBERS)
    ours, alone = (tables[name]["crps"].mean((0, 2)) for name in ("ensemble", "operator"))
    score = (ours / alone.clamp(min=1e-30)).mean().item()
    return score if math.isfinite(score) else 1e30


def choose_members(run, operator, generator, tasks, **options):
    """For each task what scores best on val goes to the generator and to `choices.json`.

    `options`: the values of an attribute for each task; one attribute is chosen after the other,
    beginning with all at their first values.
    """
    path = run.folder / "choices.json"
    chosen = read_json(path)
    for name, values in options.items():
        setattr(generator, name, [one[0] for one in values])
    for index, task in enumerate(tasks):
        own = chosen.setdefault(task.name, {})
        for name, values in options.items():
            scores = {}
            for value in values[index]:
                getattr(generator, name)[index] = value
                scores[value] = val_score(run.accelerator, operator, generator, task, index)
            own[name] = getattr(generator, name)[index] = min(scores, key=scores.get)
            own["crps_ratio"] = scores[own[name]]
    if run.accelerator.is_main_process:
        write_json(path, chosen)
