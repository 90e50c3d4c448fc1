"""Measure a run on the test split, in physical units: operator, ensembles, yardsticks, probes.

    accelerate launch evaluate.py --run runs/burgers1d                            # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml evaluate.py --run runs/burgers1d
    accelerate launch --config_file accelerate_configs/2gpu.yaml evaluate.py --run runs/burgers1d

Takes the finished stages of the run, in float32, on any number of processes. Writes
runs/NAME/evaluation/ (.._pdebench, .._partial, .._other_data with --protocol pdebench,
--trajectories, --data): metrics.json, every number with its definition and interval, and
report.html, one file to open in a browser.
"""

import dataclasses
import difflib
import math
from pathlib import Path

from ups.config import UsageError, check, command, flat, parse
from ups.eval.data import PROTOCOLS, in_words, open_data
from ups.eval.ensemble import drawn, yardsticks
from ups.eval.forecasts import make_forecasts, scored
from ups.eval.measure import (
    best_median_worst,
    by_lead,
    judge,
    plan_rows,
    show,
    spectrum_leads,
)
from ups.eval.metrics import DEFINITIONS
from ups.eval.report import made_with, pays, write_report
from ups.eval.truth import against_truth, truth_of
from ups.files import read_json, refuse_links
from ups.stages import finished, load_class, load_generator, load_operator
from ups.train.ranks import make_accelerator, on_main


@dataclasses.dataclass(frozen=True)
class Config:
    run: str = "runs/burgers1d"  # folder of the run; its stages are found in it
    data: tuple[str, ...] = ()   # files or folders, also of other data; empty: the run's own
    protocol: str = "initial"    # initial: from the first frame; pdebench: ten frames are given
    trajectories: int = 0        # of the test split; 0: all
    members: int = 0             # of an ensemble; 0: as its stage has it
    calls: int = 0               # of the network, to draw a member; 0: as the stage has it
    model: str = ""              # FILE.py:Class of an operator of your own
    solver_seconds: float = 0.0  # that your solver takes for a trajectory: when does it pay?
    seed: int = 0                # of members and intervals

    def __post_init__(self):
        check(self, trajectories=(0, math.inf), members=(0, math.inf), calls=(0, math.inf),
              seed=(0, 2**31), solver_seconds=(0, 1e9))
        if self.protocol not in PROTOCOLS:
            raise UsageError(f"--protocol {self.protocol}: it is {' or '.join(PROTOCOLS)}.")
        if self.members == 1:
            raise UsageError("--members 1: an ensemble needs at least 2.")


def load_stages(run, model):
    """{stage: Loaded} of the operator and what draws ensembles; nothing of a steady run."""
    if not run.is_dir():
        there = sorted(p.name for p in run.parent.iterdir()) if run.parent.is_dir() else []
        near = difflib.get_close_matches(run.name, there, n=1)
        raise UsageError(f"there is no run {run}; " + (f"the nearest is {run.parent / near[0]}."
                         if near else "train one with `accelerate launch train_operator.py`."))
    for path in (run / "steady", *run.glob("evaluation*")):  # whose pictures are shown; written
        refuse_links(path, run)
    if not (run / "operator").is_dir() and (run / "steady" / "test.json").exists():
        return {}
    operator = load_operator(run, load_class(model))
    return {"operator": operator} | {stage: load_generator(run, stage, operator)
                                     for stage in finished(run)}


def evaluate(accelerator, cfg, task, index, stages, perturbed):
    """Numbers and pictures of a task, the same on every rank."""
    spec, test = scored(task), task.fields.split("test")[: cfg.trajectories or None]
    operator, shown = stages["operator"].model, {}
    generators = {name: stage for name, stage in stages.items() if name != "operator"}
    most = max((cfg.members or stage.settings.members for stage in generators.values()), default=8)
    for name, stage in generators.items():
        own = getattr(stage.settings, "calls", 1)
        learned = {"ensemble": 1, "consistency": own}.get(name, math.inf)
        stage.model.calls = min(cfg.calls or own, learned)
        shown[name] = drawn(stage.model, task, index, cfg.members or stage.settings.members,
                            cfg.seed)
    others = yardsticks(task, index, operator, perturbed, cfg.members or most, cfg.seed)
    shown = {"operator": others.pop("operator")} | shown
    found, tables = judge(accelerator, task,
                          shown | others | make_forecasts(task, index, operator), test, cfg.seed,
                          members=most, title=task.name)
    result = {
        "pde": spec.equation, "protocol": in_words(spec, cfg.protocol, task.history),
        "trajectories": len(test), "grid": spec.grid, "channels": spec.channels, "dt": spec.dt,
        "steps": spec.frames - 1, "conserved": [spec.channels[c] for c in task.conserved],
        "spectrum_leads": spectrum_leads(spec.frames),
        "spectrum": tables["truth"]["spectrum"].mean(0).tolist(),
        "plans": plan_rows(accelerator, task, index, operator, test),
        "solver_seconds": cfg.solver_seconds, "forecasts": found}
    if path := truth_of(task):
        result["against_truth"] = against_truth(accelerator, task, path, shown | others)
    if cfg.solver_seconds and not task.fields.all_test:  # else its training is not known
        train = read_json(Path(cfg.run) / "operator" / "exit.json").get("seconds", math.nan)
        each = min(row["seconds_all"] for row in result["plans"])
        count = len(task.fields) - len(task.fields.split("test"))
        result["pays"] = pays(count, cfg.solver_seconds, train, each)
    chosen = best_median_worst(tables["operator"]["nrmse"], test)
    return result, {"facts": spec, "chosen": chosen, "params": task.fields.params(chosen),
                    "fields": show(accelerator, task, shown, chosen, test),
                    "errors": by_lead(tables)}


def main(argv=None):
    cfg = parse(Config, argv, __doc__)

    # stages and data
    accelerator, run = make_accelerator(), Path(cfg.run)
    stages = load_stages(run, cfg.model)
    tasks = open_data(accelerator, cfg, stages["operator"]) if stages else []
    for stage in stages.values():
        stage.model.to(accelerator.device)

    # measure
    names = list(stages["operator"].facts) if stages else []
    perturbed = stages and load_generator(run, "operator", stages["operator"]).model
    results = {task.name: evaluate(accelerator, cfg, task, names.index(task.name), stages,
                                   perturbed) for task in tasks}

    # write
    steady = read_json(run / "steady" / "exit.json").get("status") == "done"
    made = [*stages, *["steady"] * steady]
    models = {stage: read_json(run / stage / "model" / "config.json") for stage in made}
    about = {
        "run": cfg.run, "split": "test", "definitions": DEFINITIONS, "evaluation": flat(cfg),
        "tasks": {name: result for name, (result, _) in results.items()},
        "steady": read_json(run / "steady" / "test.json") if steady else {},
        "lineage": {stage: {key: model.get(key) for key in ("fingerprint", "lineage")}
                    for stage, model in models.items()},
        "config": {stage: read_json(run / stage / "config.json") for stage in made},
        "made_with": made_with(accelerator)}
    folder = "evaluation" + "_pdebench" * (cfg.protocol == "pdebench")
    folder += "_partial" * (cfg.trajectories > 0 or len(tasks) < len(names))  # no whole test split
    folder += "_other_data" * any(task.fields.all_test for task in tasks)
    on_main(accelerator, write_report, run / folder, about,
            {name: pictures for name, (_, pictures) in results.items()})
    accelerator.end_training()


if __name__ == "__main__":
    command(main)
