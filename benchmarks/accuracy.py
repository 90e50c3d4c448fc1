"""Error after the same seconds of training: the operator, an FNO and a U-Net, on the same data.

    python -m benchmarks.accuracy                                   # five tasks, one recipe
    python -m benchmarks.accuracy --task ns2d --models "operator --size l" "fno --model.width 96"
    python -m benchmarks.accuracy --split val --steps 4000 --parallel 6 --models \\
        "operator --size m" "operator --size m --lr 4e-3"           # a sweep of settings

A model is a name and, in quotes, flags that change it: fields of `train_operator.Config` for the
operator, which is trained by `train_operator.main` with these flags and nothing else; of
`FNORecipe` and `UNetRecipe` for the baselines, whose settings differ from task to task
(benchmarks/baselines.py). --seed 1 is another experiment: other data and other weights. Each model
trains in a process of its own, for as many steps as fit the seconds (benchmarks/budget.py).
Compilation and validation are not counted. Several at a time share the card: give them --steps.

A result is stored in --out under the hash of its configuration and never computed twice. The code
is no part of the hash: give another --out where the code has changed. The settings are those for
100 s on a GPU; a CPU tries the command, not the models. The best average by validation is tested
once; to choose settings take --split val, which never sees test.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import train_operator as script
from benchmarks import scripts
from benchmarks.baselines import BASELINES, chosen_for, train_baseline
from benchmarks.budget import MOMENTS, VAL, WARMUP, steps_within, trial_steps
from benchmarks.ratios import report, summary
from benchmarks.tables import device_name
from ups.config import UsageError, check, command, flat, parse
from ups.data.solvers import SOLVERS
from ups.eval.finish import operator_errors
from ups.eval.metrics import NRMSE
from ups.files import lock_folder, read_json, write_json
from ups.train.tracking import Metrics

ROOT = Path(__file__).resolve().parent.parent
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
            if self.preset not in SOLVERS[task].PRESETS:
                raise UsageError(f"--preset {self.preset}: {task} has "
                                 f"{', '.join(SOLVERS[task].PRESETS)}.")
        for model in self.models:
            try:
                kind, *flags = shlex.split(model)
            except ValueError:
                raise UsageError(f"--models {model}: it is empty, or a quotation mark is not "
                                 "closed.") from None
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


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# ---- one cell, in a process of its own


def work(path):
    """Train the model of one cell."""
    cell, folder = json.loads(Path(path).read_text()), Path(path).with_suffix("")
    train = train_operator if cell["kind"] == "operator" else train_baseline
    result = train(cell, folder)
    tables = result.pop("tables")
    result["scores"] = {name: table.mean(1).tolist() for name, table in tables.items()}
    result["scores"]["by_lead"] = tables["rollout"].mean(0).tolist()
    write_json(folder / "result.json", cell | result | {"at": time.strftime("%Y-%m-%d")})


def train_operator(cell, folder):
    """`train_operator.main` twice: a few steps that are timed, then the training."""
    cuda, result = torch.cuda.is_available(), {}

    def words(name, steps, moments):
        return [*cell["flags"], *scripts.argv({
            "run": folder / name, "steps": steps, "eval_every": -(-steps // moments),
            "save_every": steps, "log_every": max(1, steps // 20), "val_trajectories": VAL,
            "warmup": max(1, round(WARMUP * steps)), "cache": folder / "cache",
            "data": cell["folder"], "tasks": cell["task"], "seed": cell["seed"], "compile": cuda})]

    def finish(run, model, tasks):
        tables = operator_errors(run.accelerator, model, tasks[0], 0,
                                 tasks[0].fields.split(cell["split"]), ("operator", "one_step"))
        result["tables"] = {name: tables[forecast]["nrmse"].nanmean(2) for name, forecast in
                            (("rollout", "operator"), ("one_step", "one_step"))}
        result["parameters"] = sum(p.numel() for p in model.parameters())

    few, timed = trial_steps(cuda)
    step = 1 / scripts.speed(script, words("probe", few + timed, 1), timed,
                             validate=lambda *args: {"val/nrmse_rollout": math.inf},
                             test_operator=lambda *args: None)
    steps = cell["steps"] or steps_within(cell["seconds"], step)
    moments = MOMENTS if cell["split"] == "test" else 2  # a sweep
    scripts.run(script, words("run", steps, moments), test_operator=finish)
    lines = Metrics(folder / "run" / "operator" / "metrics.jsonl").read()
    curve = [(line["step"] * step, line["val/nrmse_rollout"]) for line in lines
             if "val/nrmse_rollout" in line]
    return {"steps": steps, "curve": curve, "step_ms": 1e3 * step,
            "batch_size": settings(cell)["batch_size"]} | result


# ---- all cells, their tables and pictures


def make_data(task, cfg, out):
    """Make the data of a task where they are missing; return their folder."""
    about = {"preset": cfg.preset, **(DATA.get(task, {}) if cfg.preset == "medium" else {}),
             **({"seed": cfg.seed} if cfg.seed else {})}
    folder = out / "data" / f"{task}_{digest(about)}"
    made = subprocess.run([sys.executable, "-m", "ups.data", "make", task, "--out", folder,
                           *scripts.argv(about)], cwd=ROOT)
    if made.returncode:
        raise UsageError("the data could not be made; the message above says why.")
    return folder, about


def train(cell, folder):
    """Train one cell in a new process; return its result, or None where that failed."""
    if not (folder / "result.json").exists():
        print(f"training {folder.name}: see {folder}/log.txt", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)  # of a training that was interrupted
        folder.mkdir(parents=True)
        write_json(folder.with_suffix(".json"), cell)
        code = "import sys; from benchmarks.accuracy import work; work(sys.argv[1])"
        with open(folder / "log.txt", "w") as log:
            done = subprocess.run([sys.executable, "-c", code, folder.with_suffix(".json")],
                                  cwd=ROOT, stdout=log, stderr=log, env=scripts.CHILD)
        if done.returncode:
            words = (folder / "log.txt").read_text().split("Error: ")[-1].strip()
            print(f"{folder.name} failed: {words or done.returncode}", file=sys.stderr)
            return None
    return read_json(folder / "result.json")


def main(argv=None):
    try:
        cfg = parse(Config, argv, __doc__)
    except UsageError as error:
        if "there is no field" not in str(error):
            raise
        raise UsageError(f"{error} Flags of a model go into its quotes: --models "
                         '"unet --lr 1e-3".') from None
    out, cells = Path(cfg.out).resolve(), {}
    for task, model in itertools.product(dict.fromkeys(cfg.task), cfg.models):
        kind, *flags = shlex.split(model)
        cell = {"kind": kind, "flags": [*chosen_for(kind, task), *flags], "task": task,
                "seconds": cfg.seconds, "steps": cfg.steps, "seed": cfg.seed,
                "device": device_name(), "split": cfg.split}
        try:
            cells[task, model] = cell, settings(cell)
        except UsageError as error:
            raise UsageError(f"{model}: {error}") from None

    def result_of(key):
        cell, chosen = cells[key]
        task, (folder, about) = cell["task"], data[cell["task"]]
        mark = digest(cell | {"data": about, "flags": "", "settings": chosen})
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
