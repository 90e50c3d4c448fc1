"""What the stages say of themselves: validation while they train, and their one test at the end,
which prints a table, writes `test.json` and leaves a picture. Every rank calls.
"""

import dataclasses
import math

import torch

from ups.eval.ensemble_scores import SIZES
from ups.eval.ensemble_scores import choose as choose_members
from ups.eval.forecasts import make_forecasts, scored
from ups.eval.measure import (
    LEADS,
    best_median_worst,
    by_lead,
    lead_table,
    measure,
    show,
    text_table,
)
from ups.eval.metrics import DRIFT, NRMSE
from ups.eval.plans import choose
from ups.eval.plots import draw_codec, draw_rollouts, picture
from ups.models.codec import truncate
from ups.models.generators import Perturbed

ROWS = {"operator": "operator", "persistence": "persistence", "codec": "codec floor"}


def operator_errors(accelerator, model, task, index, chosen, names=(*ROWS, "one_step")):
    """{forecast: {"nrmse": (n, T - 1, C), "drift": ..}} of an operator and its yardsticks."""
    forecasts = make_forecasts(task, index, model)
    tables, _ = measure(accelerator, task, {name: forecasts[name] for name in names}, chosen,
                        only=("nrmse", "drift"))
    return tables


def mean_error(tables):
    """nRMSE: the mean over trajectories, leads and channels; what is zero everywhere is left out"""
    return tables["nrmse"].nanmean(2).nanmean().item()


def validate(run, model, tasks):
    """Errors of each task in physical units, and their geometric mean: so all tasks count alike."""
    scores = {"val/nrmse_1": 1.0, "val/nrmse_rollout": 1.0}
    for index, task in enumerate(tasks):
        chosen = task.fields.split("val")[: run.cfg.val_trajectories]
        tables = operator_errors(run.accelerator, model, task, index, chosen,
                                 ("one_step", "operator"))
        for name, forecast in (("nrmse_1", "one_step"), ("nrmse_rollout", "operator")):
            error = mean_error(tables[forecast])
            scores[f"val/{name}"] *= error ** (1 / len(tasks))
            if len(tasks) > 1:
                scores[f"val/{task.name}/{name}"] = error
    return scores


def test_operator(run, model, tasks):
    """Roll out every task from the first frame of its test trajectories, by the plan that the
    validation split chooses."""
    choose(run, model, tasks)
    results = {}
    for index, task in enumerate(tasks):
        test = task.fields.split("test")
        tables = operator_errors(run.accelerator, model, task, index, test)
        chosen = best_median_worst(tables["operator"]["nrmse"], test)
        operator = {"operator": make_forecasts(task, index, model)["operator"]}
        fields = show(run.accelerator, task, operator, chosen, test)
        scores = {name: {"by_lead": tables[name]["nrmse"].nanmean(2).nanmean(0).tolist(),
                         "all": mean_error(tables[name])} for name in ROWS}
        leads = [lead for lead in LEADS if lead <= len(scores["operator"]["by_lead"])]
        result = results[task.name] = {
            "trajectories": len(test), "leads": leads,
            "nrmse": {name: [one["by_lead"][lead - 1] for lead in leads]
                      for name, one in scores.items()},
            "nrmse_rollout": {name: one["all"] for name, one in scores.items()},
            "nrmse_1": mean_error(tables["one_step"])}
        last = [f"one step from the true frame: {result['nrmse_1']:.2e}"]
        if task.conserved:
            drift = result["conservation_drift"] = tables["operator"]["drift"].mean().item()
            last.append(f"drift of the conserved mean:  {drift:.2e}")
        if run.accelerator.is_main_process:
            title = (f"{task.name}: test nRMSE of {len(test)} trajectories, rolled out from the "
                     "first frame")
            print(lead_table(title, {ROWS[name]: (one, ()) for name, one in scores.items()}),
                  *last, sep="\n")
            name = "rollout.png" if len(tasks) == 1 else f"rollout_{task.name}.png"
            picture(run.folder / name, draw_rollouts, scored(task), fields, by_lead(tables))
    if run.accelerator.is_main_process:
        run.write("test.json", {"definition": f"{NRMSE}; {DRIFT}", "split": "test",
                                "tasks": results})
        print(NRMSE + ".")
    choose_members(run, model, Perturbed(model, None), tasks, perturbation=[SIZES] * len(tasks))


# codecs
def codec_error(accelerator, codec, task, split):
    """nRMSE of decode(encode(u))."""
    own = dataclasses.replace(task, codec=codec, width=codec.width)
    tables = operator_errors(accelerator, None, own, 0, task.fields.split(split), ("codec",))
    return mean_error(tables["codec"])


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
    run.write("test.json", {"definition": NRMSE.split(";")[0], "split": "test",
                            "tasks": {facts.name: result}})
    u = fields.read(fields.split("test")[:1])[0].to(device)
    picture(run.folder / "codec.png", draw_codec, facts, u,
            *(one.decode(one.encode(u)) for one in codecs.values()))
