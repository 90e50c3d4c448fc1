"""Error after the same seconds of training: the operator, an FNO and a U-Net, on the same data.

    python -m benchmarks.accuracy                                   # five tasks, one recipe
    python -m benchmarks.accuracy --task ns2d --models "operator --size l" "fno --model.width 96"
    python -m benchmarks.accuracy --split val --seconds 40 --parallel 12 --models \\
        "operator --size m" "operator --size m --lr 4e-3"           # a sweep of settings

A model is a name and, in quotes, flags that change it: of `train_operator.py` for the operator, of
`FNORecipe` and `UNetRecipe` for the baselines, whose settings differ from task to task
(benchmarks/baselines.py). --seed 1 is another experiment: other data and other weights. Each model
trains in a process of its own, for as many steps as fit the seconds; compilation and validation are
not counted. With --parallel trainings share the card; while one times its steps, the others stand
still, so that each has as many steps as a card of its own would give it.

A result is stored in --out under the hash of its configuration and never computed twice. The code
is no part of the hash: give another --out where the code has changed. The best average by
validation is tested once; to choose settings take --split val, which never sees test.
"""

import dataclasses
import itertools
import json
import math
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean as mean
from statistics import geometric_mean

import torch

import train_operator as script
from benchmarks import bench
from benchmarks.baselines import BASELINES, chosen_for, train_baseline
from benchmarks.bench import heading, row
from ups.config import RunError, UsageError, check, command, flat, parse
from ups.data.solvers import SOLVERS
from ups.eval.forecasts import make_forecasts
from ups.eval.measure import measure
from ups.eval.metrics import NRMSE, interval, resamplings
from ups.eval.plots import picture
from ups.files import lock_folder, read_json, write_json
from ups.train.tracking import Metrics

DATA = {  # what is changed in the preset medium: sizes for minutes of training
    "burgers1d": {}, "advection1d": {},
    "diffreact2d": {"samples": 500, "frames": 51},
    "swe2d": {"samples": 500, "frames": 51},
    "ns2d": {"samples": 500, "grid": 64, "nu": 0.005},
}
GIVEN = {  # fields of train_operator.Config that the benchmark sets
    "tasks", "data", "cache", "run", "steps", "warmup", "eval_every", "save_every", "log_every",
    "val_trajectories", "compile", "dry_run", "seed"}


@dataclasses.dataclass(frozen=True)
class Config:
    task: tuple[str, ...] = tuple(DATA)  # one or several
    models: tuple[str, ...] = ("operator --size m", "fno", "unet")  # each with its flags, in quotes
    seconds: float = 100.0  # of training steps, for each model and task
    steps: int = 0          # so many steps, instead of seconds
    parallel: int = 1       # trainings at a time
    split: str = "test"     # val: to choose settings
    preset: str = "medium"  # of the data, which are made where missing; small for a CPU
    out: str = "benchmarks/results"  # results by hash, data, logs and pictures
    seed: int = 0           # of data, weights and batches

    def __post_init__(self):
        check(self, seconds=(0.1, 1e6), seed=(0, 2**31), steps=(0, 10**9), parallel=(1, 64))
        if self.split not in ("val", "test"):
            raise UsageError(f"--split {self.split}: it is val or test.")
        for task in self.task:
            if task not in SOLVERS:
                raise UsageError(f"--task {task}: it is one of {', '.join(SOLVERS)}.")
        for model in self.models:
            kind, *flags = shlex.split(model) or [""]
            if kind not in ("operator", *BASELINES):
                raise UsageError(f"--models {model}: it begins with operator, fno or unet.")
            names = {word.split("=")[0].removeprefix("--").removeprefix("no-") for word in flags}
            if taken := names & GIVEN:
                raise UsageError(f"--models {model}: --{min(taken)} is the benchmark's to give.")


def settings(cell):
    """Every field that shapes the result, as plain values."""
    if cell["kind"] in BASELINES:
        return flat(parse(BASELINES[cell["kind"]][1], cell["flags"]))
    fields = flat(parse(script.Config, [*cell["flags"], "--tasks", cell["task"]]))
    return {key: value for key, value in fields.items() if key not in GIVEN}


# one cell, in a process of its own
def work(path):
    """Train the model of one cell."""
    cell, folder = json.loads(Path(path).read_text()), Path(path).with_suffix("")
    result = (train_operator(cell, folder) if cell["kind"] == "operator"
              else train_baseline(cell)[1])
    tables = result.pop("tables")
    result["scores"] = {name: table.mean(1).tolist() for name, table in tables.items()}
    result["scores"]["by_lead"] = tables["rollout"].mean(0).tolist()
    write_json(folder / "result.json", cell | result | {"at": time.strftime("%Y-%m-%d")})


def train_operator(cell, folder):
    """`train_operator.main` twice: a few steps that are timed, then the training."""
    result, moments = {}, bench.MOMENTS if cell["split"] == "test" else 2  # a sweep

    def words(name, steps, moments=1):
        return [*cell["flags"], *bench.flags(
            steps, moments, run=folder / name, val_trajectories=bench.VAL, cache=folder / "cache",
            data=cell["folder"], tasks=cell["task"], seed=cell["seed"])]

    def finish(run, model, tasks):
        forecasts = make_forecasts(tasks[0], 0, model)
        tables = measure(run.accelerator, tasks[0],
                         {name: forecasts[name] for name in ("operator", "one_step")},
                         tasks[0].fields.split(cell["split"]), only=("nrmse",))
        result["tables"] = {name: tables[forecast]["nrmse"].nanmean(2) for name, forecast in
                            (("rollout", "operator"), ("one_step", "one_step"))}
        result["parameters"] = sum(p.numel() for p in model.parameters())

    step = bench.step_seconds(script, lambda steps: words("probe", steps))
    steps = cell["steps"] or bench.steps_within(cell["seconds"], step)
    bench.run(script, words("run", steps, moments), test_operator=finish)
    lines = Metrics(folder / "run" / "operator" / "metrics.jsonl").read()
    curve = [(line["step"] * step, line["val/nrmse_rollout"]) for line in lines
             if "val/nrmse_rollout" in line]
    return {"steps": steps, "curve": curve, "step_ms": 1e3 * step,
            "batch_size": settings(cell)["batch_size"]} | result


# all cells, their tables and pictures
def make_data(task, cfg, out):
    """Make the data of a task where they are missing; return their folder."""
    about = {"preset": cfg.preset, **(DATA.get(task, {}) if cfg.preset == "medium" else {}),
             **({"seed": cfg.seed} if cfg.seed else {})}
    folder = out / "data" / f"{task}_{bench.digest(about)}"
    bench.call(None, "-m", "ups.data", "make", task, "--out", folder, *bench.argv(about))
    return folder, about


def train(cell, folder):
    """Train one cell in a new process; return its result, or None where that failed."""
    if not (folder / "result.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a training that was interrupted
        folder.mkdir(parents=True)
        write_json(folder.with_suffix(".json"), cell)
        code = "import sys; from benchmarks.accuracy import work; work(sys.argv[1])"
        try:
            bench.call(folder / "log.txt", "-c", code, folder.with_suffix(".json"))
        except RunError as error:
            print(f"{folder.name} failed: {error}", file=sys.stderr)
            return None
    return read_json(folder / "result.json")


def report(task, results, out):
    """The table of a task, the ratio to the best baseline, and the picture."""
    first = next(iter(results.values()))
    rolled = {model: torch.tensor(r["scores"]["rollout"], dtype=torch.float64)
              for model, r in results.items()}
    count, leads = (len(first["scores"][key]) for key in ("rollout", "by_lead"))
    weights, title = resamplings(count), (
        f"{task}, {first['seconds']:g} s of training each, {first['device']}, seed "
        f"{first['seed']}, {first['at']}")
    about = " ".join(f"{key}={value}" for key, value in first["data"].items())
    heading(f"{title} ({about})\nnRMSE of {count} {first['split']} trajectories: one step "
            f"from each true frame; {leads} steps from the first one, with 95 % bootstrap "
            "intervals over trajectories", "model", "parameters", "batch", "steps", "ms a step",
            "one step", "roll-out", "interval")
    for model, r in results.items():
        low, high = interval(weights @ rolled[model])
        row(model, f"{r['parameters']:,}", r["batch_size"], f"{r['steps']:,}",
            f"{r['step_ms']:.2f}", f"{mean(r['scores']['one_step']):.2e}",
            f"{rolled[model].mean():.2e}", f"[{low:.2e}, {high:.2e}]")
    print()
    ours = [model for model, r in results.items() if r["kind"] == "operator"]
    theirs = {model: errors for model, errors in rolled.items() if model not in ours}
    for model in [model for model, errors in theirs.items() if not errors.isfinite().all()]:
        print(f"{model}: some roll-outs overflow; no ratio to it.")
        theirs.pop(model)
    for model in ours if theirs else ():
        best = min(theirs, key=lambda name: theirs[name].mean())
        errors = rolled[model]
        low, high = interval((weights @ errors) / (weights @ theirs[best]))
        print(f"roll-out of {model} / {best}: {errors.mean() / theirs[best].mean():.2f} "
              f"[{low:.2f}, {high:.2f}]")
    name = f"{task}_{first['seconds']:g}s_{first['split']}_seed{first['seed']}.png"
    picture(out / name, draw, title, results)


def summary(tables):
    """The roll-out errors of all tasks, and their geometric mean as a share of the first one's."""
    models = list(dict.fromkeys(model for results in tables.values() for model in results))
    errors = {model: [mean(results[model]["scores"]["rollout"]) if model in results else math.nan
                      for results in tables.values()] for model in models}
    heading("roll-out nRMSE", "model", *tables, "mean")
    for model in models:
        shares = [e / base for e, base in zip(errors[model], errors[models[0]], strict=True)]
        row(model, *[f"{e:.2e}" for e in errors[model]], f"{geometric_mean(shares):.3f}")


def draw(figure, title, results):
    """Validation error against training time, and error against lead time."""
    figure.set_size_inches(11, 4.2)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for model, r in results.items():
        left.semilogy(*zip(*r["curve"], strict=True), "o-", ms=4,
                      label=f"{model} ({r['parameters'] / 1e6:.2g} M)")
        errors = r["scores"]["by_lead"]
        right.semilogy(range(1, len(errors) + 1), errors, marker="o" * (len(errors) < 2))
        split = r["split"]
    left.set(xlabel="seconds of training", ylabel="nRMSE of the roll-out, val", xlim=(0, None))
    right.set(xlabel="step of the roll-out", ylabel=f"nRMSE, {split}")
    left.legend()


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    out, cells = Path(cfg.out).resolve(), {}
    for task, model in itertools.product(dict.fromkeys(cfg.task), cfg.models):
        kind, *flags = shlex.split(model)
        cell = {"kind": kind, "flags": [*chosen_for(kind, task), *flags], "task": task,
                "seconds": cfg.seconds, "steps": cfg.steps, "seed": cfg.seed,
                "device": bench.device_name(), "split": cfg.split}
        try:
            cells[task, model] = cell, settings(cell)
        except UsageError as error:
            raise UsageError(f"{model}: {error}") from None

    def result_of(key):
        cell, chosen = cells[key]
        task, (folder, about) = cell["task"], data[cell["task"]]
        mark = bench.digest(cell | {"data": about, "flags": "", "settings": chosen})
        return train(cell | {"data": about, "folder": str(folder)},
                     out / f"{task}_{cell['kind']}_{mark}")

    with lock_folder(out, "--out"), ThreadPoolExecutor(cfg.parallel) as pool:
        data = {task: make_data(task, cfg, out) for task in dict.fromkeys(cfg.task)}
        results = list((pool.map if cfg.parallel > 1 else map)(result_of, cells))
        tables = {task: {model: result for (of, model), result in zip(cells, results, strict=True)
                         if of == task and result} for task in data}
        for task, found in tables.items():
            if found:
                report(task, found, out)
    if len(tables) > 1:
        summary(tables)
    if any(results):
        print(f"\n{NRMSE}.")
    return not all(results)


if __name__ == "__main__":
    command(main)
