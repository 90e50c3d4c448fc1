"""Measure a run on the test split, in physical units:  operator, ensembles, yardsticks, probes.

    accelerate launch evaluate.py --run runs/burgers1d                            # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml evaluate.py --run runs/burgers1d
    accelerate launch --config_file accelerate_configs/2gpu.yaml evaluate.py --run runs/burgers1d

Takes the finished stages of the run, in float32, on any number of processes. Writes
runs/NAME/evaluation/ (evaluation_pdebench/ with --protocol pdebench, .._partial/ with
--trajectories): metrics.json and metrics.csv,
every number with its definition and interval, and report.html, one file to open in a browser.
"""

import dataclasses
import difflib
import math
import platform
from pathlib import Path
from types import SimpleNamespace

import accelerate
import numpy
import torch

from ups.config import UsageError, check, command, flat, parse
from ups.data.fields import Fields
from ups.data.find import NoData
from ups.data.find import open_data as find_fields
from ups.eval.ensemble import drawn, dressed
from ups.eval.forecasts import PROTOCOLS, begin, in_words, make_forecasts
from ups.eval.measure import best_median_worst, measure, show, spectrum_leads, summarise
from ups.eval.metrics import DEFINITIONS
from ups.eval.outputs import write_outputs
from ups.eval.plans import plan_rows
from ups.files import read_json
from ups.latents import TaskLatents
from ups.stages import (
    facts_of,
    inherit,
    load_class,
    load_generator,
    load_operator,
    own_codec,
)
from ups.train.ranks import make_accelerator, on_main

ENSEMBLES = ("ensemble", "diffusion", "consistency")


@dataclasses.dataclass(frozen=True)
class Config:
    run: str = "runs/burgers1d"  # folder of the run; its stages are found in it
    data: tuple[str, ...] = ()   # files or folders with fields, others too; empty: the run's own
    protocol: str = "initial"    # initial: from the first frame; pdebench: ten frames are given
    trajectories: int = 0        # of the test split; 0: all
    members: int = 0             # of an ensemble; 0: as its stage has it
    calls: int = 0               # of the network, to draw a member; 0: as the stage has it
    model: str = ""              # FILE.py:Class of an operator of your own
    seed: int = 0                # of members and intervals

    def __post_init__(self):
        check(self, trajectories=(0, math.inf), members=(0, math.inf), calls=(0, math.inf),
              seed=(0, 2**31))
        if self.protocol not in PROTOCOLS:
            raise UsageError(f"--protocol {self.protocol}: it is {' or '.join(PROTOCOLS)}.")
        if self.members == 1:
            raise UsageError("--members 1: an ensemble needs at least 2.")


def find_stages(run, model=""):
    """{stage: Loaded} of the operator and its generators; the test.json of a steady prior."""
    if not run.is_dir():
        there = sorted(p.name for p in run.parent.iterdir()) if run.parent.is_dir() else []
        near = difflib.get_close_matches(run.name, there, n=1)
        raise UsageError(f"there is no run {run}; " + (f"the nearest is {run.parent / near[0]}."
                         if near else "train one with `accelerate launch train_operator.py`."))
    done = [stage for stage in (*ENSEMBLES, "steady")  # what still trains is left out
            if read_json(run / stage / "exit.json").get("status") == "done"]
    steady = read_json(run / "steady" / "test.json") if "steady" in done else {}
    if steady and not (run / "operator").is_dir():
        return {}, steady
    operator = load_operator(run, load_class(model))
    for task in operator.settings.tasks:
        folder = run / "codec" / task.split(":")[0] / "model"
        if not (folder / "config.json").exists():
            raise UsageError(f"{folder}: the codec that the operator was trained with is missing; "
                             f"put it back, or train a new --run.")
    return {"operator": operator} | {stage: load_generator(run, stage, operator)
                                     for stage in ENSEMBLES if stage in done}, steady


def open_data(accelerator, cfg, operator):
    """Tasks of the operator, with fields that begin where the protocol begins.

    With --data they may be other data than those of the training: all of these are test.
    """
    known, run = facts_of(operator), Path(cfg.run)
    source = inherit(SimpleNamespace(run=cfg.run), operator)
    source.data = cfg.data or source.data
    found = on_main(accelerator, find_data, source, bool(cfg.data))
    codecs = {name: own_codec(run, name, operator.config["lineage"]) for name in known}
    tasks = []
    for fields in found:
        name = fields.facts.name
        if len(known) == 1:
            name, = known
        if name not in known:
            raise UsageError(f"{fields.files[0].path}: {cfg.run} knows no {name}; it knows "
                             f"{', '.join(known)}. Give the data that name in --facts.")
        if operator.config["lineage"].get(f"data of {name}") != fields.digest:
            if not cfg.data:
                raise UsageError(f"{cfg.run}: the data of {name} are not those of the training; "
                                 "put them back, or give --data to judge the run on these.")
            fields = as_test(fields, known[name])
        codec, mark = codecs[name]
        tasks.append(TaskLatents(known[name], codec.to(accelerator.device), mark, fields,
                                 plans=operator.plans(name)))
    for task in tasks:
        task.width = max(codec.spec.width for codec, _ in codecs.values())
        task.params = max(len(facts.params) for facts in known.values())
        task.fields = begin(task.fields, cfg.protocol)
    return tasks


def find_data(source, moved):
    """The fields that a run had, or has now; data are never made."""
    try:
        return find_fields(source, make=False)
    except NoData as error:
        raise error if moved else NoData(
            f"{error} Where the data of {source.run} have moved, say where: --data.") from None


def as_test(fields, facts):
    """Other data than those of the training, all of them test, with the facts of the training."""
    for what in ("channels", "inputs", "axes", "grid", "boundary", "params"):
        ours, theirs = (getattr(one, what) for one in (facts, fields.facts))
        if ours != theirs:
            raise UsageError(f"{fields.files[0].path}: its {what} are {theirs}, those of the "
                             f"training {ours}; only the same can be judged.")
    if not math.isclose(fields.facts.dt, facts.dt, rel_tol=1e-4):
        raise UsageError(f"{fields.files[0].path}: its frames are {fields.facts.dt:g} apart, those "
                         f"of the training {facts.dt:g}; only the same can be judged.")
    fields = Fields(fields.files, fields.stride_x, fields.frames.step, all_test=True)
    fields.facts = dataclasses.replace(facts, frames=fields.facts.frames)
    print(f"{facts.name}: {fields.files[0].path} is other data than the training had; all "
          f"{len(fields)} trajectories are test.")
    return fields


def evaluate(accelerator, cfg, task, index, stages, perturbed=None):
    """Numbers and pictures of a task, the same on every rank."""
    operator, sizes, calls = stages["operator"].model, {}, {}
    forecasts = make_forecasts(task, index, operator)
    for name in [name for name in ENSEMBLES if name in stages]:
        sizes[name] = cfg.members or stages[name].settings.members
        calls[name] = calls_of(cfg, name, stages[name])
        stages[name].model.calls = calls[name]
        forecasts[name] = drawn(stages[name].model, task, index, sizes[name], cfg.seed)
    shown = {name: forecasts[name] for name in ("operator", *sizes)}
    if perturbed:  # what an ensemble must beat, without a network of its own
        members = cfg.members or max(sizes.values(), default=8)
        sizes |= {"perturbed": members, "dressing": members}
        forecasts["perturbed"] = drawn(perturbed, task, index, members, cfg.seed)
        forecasts["dressing"] = dressed(operator, task, index, accelerator.device, members,
                                        cfg.seed)
    test = task.fields.split("test")[: cfg.trajectories or None]
    tables, milliseconds = measure(accelerator, task, forecasts, test,
                                   members=max(sizes.values(), default=1), title=task.name)
    spec, truth = task.fields.facts, tables.pop("truth")
    plans = plan_rows(accelerator, task, index, operator, test)
    result = {
        "pde": spec.equation, "protocol": in_words(spec, cfg.protocol),
        "trajectories": len(test), "grid": spec.grid, "channels": spec.channels, "dt": spec.dt,
        "steps": spec.frames - 1, "conserved": [spec.channels[c] for c in task.conserved],
        "spectrum_leads": spectrum_leads(spec.frames),
        "spectrum": truth["spectrum"].mean(0).tolist(), "plans": plans,
        "forecasts": {
            name: {"milliseconds": milliseconds[name], "calls": calls.get(name, 1)}
            | summarise(table, tables["operator"], spec, sizes.get(name, 1), cfg.seed)
            for name, table in tables.items()}}
    chosen = best_median_worst(tables["operator"]["nrmse"], test)
    return result, {"spec": spec, "channel": spec.channels[0], "chosen": chosen,
                    "params": task.fields.params(chosen),
                    "fields": show(accelerator, task, shown, chosen, test)}


def calls_of(cfg, name, stage):
    """Network calls that draw a member: a student was taught no more than its own."""
    own = getattr(stage.settings, "calls", 1)
    if name == "ensemble":
        return 1
    return min(cfg.calls, own) if cfg.calls and name == "consistency" else cfg.calls or own


def main(argv=None):
    cfg = parse(Config, argv, __doc__)

    # stages and data
    accelerator, run = make_accelerator(), Path(cfg.run)
    stages, steady = find_stages(run, cfg.model)
    tasks = open_data(accelerator, cfg, stages["operator"]) if stages else []
    for stage in stages.values():
        stage.model.to(accelerator.device)

    # measure
    names = list(facts_of(stages["operator"])) if stages else []
    perturbed = stages and load_generator(cfg.run, "operator", stages["operator"]).model
    results = {task.name: evaluate(accelerator, cfg, task, names.index(task.name), stages,
                                   perturbed) for task in tasks}

    # write
    about = {
        "run": cfg.run, "split": "test", "definitions": DEFINITIONS, "steady": steady,
        "tasks": {name: result for name, (result, _) in results.items()}, "evaluation": flat(cfg),
        "lineage": {name: {"fingerprint": stage.mark, "built on": stage.config["lineage"]}
                    for name, stage in stages.items()},
        "config": {name: read_json(run / name / "config.json") for name in stages},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "accelerate": accelerate.__version__, "numpy": numpy.__version__,
                     "device": str(accelerator.device), "machine": platform.machine(),
                     "processes": accelerator.num_processes}}
    if steady:
        model = read_json(run / "steady" / "model" / "config.json")
        about["lineage"]["steady"] = {"fingerprint": model.get("fingerprint"),
                                      "built on": model.get("lineage")}
        about["config"]["steady"] = read_json(run / "steady" / "config.json")
    pictures = {name: shown for name, (_, shown) in results.items()}
    folder = "evaluation" + "_pdebench" * (cfg.protocol == "pdebench")
    folder += "_partial" * (cfg.trajectories > 0)  # no whole test split
    folder += "_other_data" * any(task.fields.all_test for task in tasks)
    on_main(accelerator, write_outputs, run / folder, about, pictures)
    accelerator.end_training()


if __name__ == "__main__":
    command(main)
