"""What the stages say of themselves: validation while they train, and their one test at the end,
which prints a table, writes `test.json` and leaves a picture. Every rank calls.

test.json is of every stage {"definitions", "split", "tasks": {name: {"trajectories", "forecasts":
{name: what `summarise` tells of it}}}}; so is metrics.json, which evaluate.py writes.
"""

import dataclasses
import math

import torch

from ups.eval.choices import SIZES, STRENGTHS, choose_members, choose_plans, val_score
from ups.eval.ensemble import drawn, yardsticks
from ups.eval.forecasts import make_forecasts, scored, start
from ups.eval.measure import (
    best_median_worst,
    by_lead,
    judge,
    lead_table,
    score_table,
    show,
    text_table,
)
from ups.eval.metrics import DEFINITIONS, NRMSE
from ups.eval.plots import draw_codec, draw_ensemble, draw_rollouts, picture
from ups.models.codec import truncate
from ups.models.generators import Perturbed
from ups.stages import load_generator
from ups.train.step import exact_inference

TEST = 16  # trajectories of the table of an ensemble's stage; evaluate.py takes all
COLUMNS = {"nrmse": "nRMSE", "vrmse": "VRMSE", "crps": "CRPS", "crps_block": "of blocks",
           "energy_score": "of fields", "spread_skill": "spread", "coverage_50": "in 50 %",
           "coverage_90": "in 90 %", "spectrum_error": "spectrum"}  # of a table: means over leads
TABLES = (*COLUMNS, "sample_nrmse", "rank", "milliseconds")  # that are measured for it


def errors_of(accelerator, model, task, index, chosen, names):
    """{forecast: nRMSE} of an operator or its yardsticks, over trajectories, leads and channels."""
    forecasts = make_forecasts(task, index, model)
    found, _ = judge(accelerator, task, {name: forecasts[name] for name in names}, chosen,
                     only=("nrmse",))
    return {name: one["scores"]["nrmse"]["all"] for name, one in found.items()}


def validate(run, model, tasks):
    """Errors of each task in physical units, and their geometric mean: so all tasks count alike."""
    scores = {"val/nrmse_1": 1.0, "val/nrmse_rollout": 1.0}
    for index, task in enumerate(tasks):
        chosen = task.fields.split("val")[: run.cfg.val_trajectories]
        errors = errors_of(run.accelerator, model, task, index, chosen, ("one_step", "operator"))
        for name, error in zip(("nrmse_1", "nrmse_rollout"), errors.values(), strict=True):
            scores[f"val/{name}"] *= error ** (1 / len(tasks))
            if len(tasks) > 1:
                scores[f"val/{task.name}/{name}"] = error
    return scores


def test_operator(run, model, tasks):
    """Roll out every task from the first frame of its test trajectories, by the plan that the
    validation split chooses."""
    choose_plans(run, model, tasks)
    results = {}
    for index, task in enumerate(tasks):
        every, test = make_forecasts(task, index, model), task.fields.split("test")
        forecasts = {name: every[name] for name in ("operator", "persistence", "codec", "one_step")}
        found, tables = judge(run.accelerator, task, forecasts, test, only=("nrmse", "drift"))
        results[task.name] = {"trajectories": len(test), "forecasts": found}
        chosen = best_median_worst(tables["operator"]["nrmse"], test)
        fields = show(run.accelerator, task, {"operator": every["operator"]}, chosen, test)
        if run.accelerator.is_main_process:
            rolled_out = {name: one for name, one in found.items() if name != "one_step"}
            print(lead_table(f"{task.name}: test nRMSE of {len(test)} trajectories, rolled out "
                             "from the first frame", rolled_out, task.facts.channels))
            single, own = (found[name]["scores"] for name in ("one_step", "operator"))
            print(f"one step from the true frame: {single['nrmse']['all']:.2e}")
            if task.conserved:
                print(f"drift of the conserved mean:  {own['drift']['all']:.2e}")
            picture(picture_of(run, "rollout", task, tasks), draw_rollouts, scored(task), fields,
                    by_lead(tables))
    write_test(run, results)
    if run.accelerator.is_main_process:
        print(f"{NRMSE}.")
    choose_members(run, model, Perturbed(model, None), tasks, perturbation=[SIZES] * len(tasks))


# ensembles
def validate_ensemble(run, operator, generator, tasks):
    """The score of each task, and their mean."""
    scores = {task.name: val_score(run.accelerator, operator, generator, task, index)
              for index, task in enumerate(tasks)}
    more = {f"val/{name}/crps_ratio": score for name, score in scores.items() if len(tasks) > 1}
    return {"val/crps_ratio": sum(scores.values()) / len(scores)} | more


def finish_ensembles(run, operator, generators, tasks):
    """Choose and test generators {stage: generator}, the last one that of this stage, beside the
    yardsticks; print, write `test.json`, draw. `operator` (Loaded) with what it chose."""
    results, members, accelerator = {}, run.cfg.members, run.accelerator
    perturbed = load_generator(run.cfg.run, "operator", operator).model
    stage, generator = list(generators.items())[-1]
    choose_members(run, operator.model, generator, tasks, strength=[STRENGTHS] * len(tasks),
                   perturbation=[(0.0, size) for size in perturbed.perturbation])
    for index, task in enumerate(tasks):
        test = task.fields.split("test")[:TEST]
        forecasts = yardsticks(task, index, operator.model, perturbed, members) | {
            name: drawn(one, task, index, members) for name, one in generators.items()}
        found, _ = judge(accelerator, task, forecasts, test, only=TABLES, members=members)
        results[task.name] = {"trajectories": len(test), "forecasts": found}
        truth, shown = futures(accelerator, task, forecasts[stage], test)
        if accelerator.is_main_process:
            print(score_table(f"{task.name}: {len(test)} test trajectories, {members} members, "
                              "mean over all leads", found, COLUMNS))
            picture(picture_of(run, "ensemble", task, tasks), draw_ensemble, scored(task), truth,
                    shown)
    write_test(run, results)


@exact_inference
def futures(accelerator, task, forecast, test):
    """Fields (T, *grid) and members (T, M, *grid) of the first channel and test trajectory."""
    s = start(task, test[:1], test, accelerator.device)
    frames = [p[0, :, 0] for p in forecast(s)]
    return s.u[0, :, 0].cpu(), torch.stack([s.u[0, :1, 0].expand_as(frames[0]), *frames]).cpu()


# codecs
def codec_error(accelerator, codec, task, split):
    """nRMSE of decode(encode(u))."""
    own = dataclasses.replace(task, codec=codec, width=codec.width)
    return errors_of(accelerator, None, own, 0, task.fields.split(split), ("codec",))["codec"]


@torch.no_grad()
def test_codec(run, codec, task):
    """Compare with the patch codec of the same width."""
    facts, fields, device = task.facts, task.fields, codec.weight.device
    codecs = {"grid": codec, "patch": truncate(task.codec, codec.width).to(device)}
    errors = {name: codec_error(run.accelerator, one, task, "test") for name, one in codecs.items()}
    if not run.accelerator.is_main_process:
        return
    values = len(facts.channels) * math.prod(facts.grid) / (math.prod(codec.tokens) * codec.width)
    print(text_table(f"{facts.name}: test nRMSE of decode(encode(u)), {values:.3g} field values "
                     "per latent value", ["nRMSE"],
                     {f"{name} codec": [error] for name, error in errors.items()}))
    result = {"compression": values, "width": codec.width, "tokens": codec.tokens,
              **{f"nrmse_{name}": error for name, error in errors.items()}}
    write_test(run, {facts.name: result})
    u = fields.read(fields.split("test")[:1])[0].to(device)
    picture(run.folder / "codec.png", draw_codec, facts, u,
            *(one.decode(one.encode(u)) for one in codecs.values()))


# what every stage leaves
def picture_of(run, what, task, tasks):
    return run.folder / (f"{what}.png" if len(tasks) == 1 else f"{what}_{task.name}.png")


def write_test(run, results):
    """Write `test.json` of {task: {"trajectories", "forecasts", ..}}."""
    if run.accelerator.is_main_process:
        run.write("test.json", {"definitions": DEFINITIONS, "split": "test", "tasks": results})
