"""Error after the same seconds of training: the operator, an FNO and a U-Net, on the same data.

    python -m benchmarks.accuracy --task burgers1d --seconds 100
    python -m benchmarks.accuracy --task diffreact2d ns2d --models operator unet
    python -m benchmarks.accuracy --models "operator --patch 2" fno "fno --model.width 96"
    python -m benchmarks.accuracy --task burgers1d ns2d --models operator --joint operator

A model is a name and, in quotes, flags that change it: fields of `train_operator.Config` for the
operator, of `FNORecipe` and `UNetRecipe` for the baselines (benchmarks/baselines.py); what they do
not name is as in benchmarks/chosen.py, which differs from task to task. The operator is trained by
`train_operator.main`. --seed 1 is another experiment: other data and other weights. --joint is one
operator for all tasks, trained for the sum of their seconds. Every model is a process of its own,
and all run at the same time: each times its steps alone and takes as many as fit the seconds
(benchmarks/turns.py). Compilation and validation are not counted, for none. (With CUDA's MPS daemon
running, processes really share the GPU.)

A result is stored in --out under the hash of its configuration and never computed twice (the code
is no part of it: give another --out where that has changed; results of several commits are named
below the table). The settings are those for 100 s on a GPU; on a CPU one tries the command, not the
models (minutes each). The best average by validation is tested once (choose settings with
--split val, which never sees test):

    nRMSE for one step from each true frame, and for the roll-out from the first frame alone, with
    95 % bootstrap intervals over the test trajectories, and the ratio operator / best baseline.
"""

import ctypes
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import train_operator as script
from benchmarks.baselines import BASELINES, train_baseline
from benchmarks.chosen import DATA, flags_of
from benchmarks.ratios import report
from benchmarks.turns import Turns
from benchmarks.watched import GIVEN, train_operator
from ups.config import UsageError, check, command, flat, parse
from ups.data.solvers import SOLVERS
from ups.eval.metrics import NRMSE
from ups.files import lock, read_json, write_json
from ups.train.ranks import PR_SET_PDEATHSIG

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Config:
    task: tuple[str, ...] = ("burgers1d",)  # one or several
    models: tuple[str, ...] = ("operator", "fno", "unet")  # each with its flags, in quotes
    joint: str = ""  # "operator", and flags: one for all tasks, for the sum of their seconds
    seconds: float = 100.0  # of training steps, for each model and task
    split: str = "test"     # val: to choose settings
    preset: str = "medium"  # of the data, which are made where missing; small for a CPU
    at_once: int = 8  # processes that compile and train at the same time
    out: str = "benchmarks/results"  # results by hash, data, logs and pictures
    seed: int = 0  # of data, weights and batches

    def __post_init__(self):
        check(self, seconds=(0.1, 1e6), at_once=(1, math.inf), seed=(0, 2**31))
        if self.split not in ("val", "test"):
            raise UsageError(f"--split {self.split}: it is val or test.")
        for task in self.task:
            if task not in SOLVERS:
                raise UsageError(f"--task {task}: it is one of {', '.join(SOLVERS)}.")
            if self.preset not in SOLVERS[task].PRESETS:
                raise UsageError(f"--preset {self.preset}: {task} has "
                                 f"{', '.join(SOLVERS[task].PRESETS)}.")
        for model in self.models:
            if model.split()[:1] not in (["operator"], *([name] for name in BASELINES)):
                raise UsageError(f"--models {model}: it begins with operator, fno or unet.")
        if self.joint and self.joint.split()[:1] != ["operator"]:
            raise UsageError(f"--joint {self.joint}: it begins with operator.")
        for model in (*self.models, self.joint):
            if model.count('"') % 2 or model.count("'") % 2:
                raise UsageError(f"{model}: a quotation mark is not closed.")
            names = [word.split("=")[0].removeprefix("--").removeprefix("no-")
                     for word in shlex.split(model) if word.startswith("--")]
            if taken := [name for name in names if name in GIVEN]:
                raise UsageError(f"{model}: --{taken[0]} is the benchmark's to give; leave it out "
                                 "(beside --models there are --task, --seconds, --preset, --seed).")
        if self.joint and len(self.task) < 2:
            raise UsageError("--joint is one operator for several tasks; name them by --task.")


# ---- one cell in a process of its own


def settings(cell):
    """Every field that shapes the result, as plain values."""
    if cell["kind"] in BASELINES:
        return flat(parse(BASELINES[cell["kind"]][1], cell["flags"]))
    fields = flat(parse(script.Config, [*cell["flags"], "--tasks", *cell["tasks"]]))
    return {key: value for key, value in fields.items() if key not in GIVEN}


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def work(path, parent):
    """Train the model of one cell."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # do not outlive the benchmark
    if os.getppid() != int(parent):  # it has died already
        sys.exit(1)
    cell, folder = json.loads(Path(path).read_text()), Path(path).with_suffix("")
    train = train_operator if cell["kind"] == "operator" else train_baseline
    result = train(cell, folder, Turns(folder.parent))
    result["scores"] = {
        task: {name: table.mean(1).tolist() for name, table in tables.items()}
        | {"by_lead": tables["rollout"].mean(0).tolist()}
        for task, tables in result.pop("tables").items()}
    result |= {"at": time.strftime("%Y-%m-%d"), "code": version()}
    write_json(folder / "result.json", cell | result)


def version():
    """The commit of this code; empty where it is not known."""
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT,
                              capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


# ---- all cells, tables and picture


def data_of(task, cfg):
    """What is asked of `ups.data make` for a task."""
    seed = {"seed": cfg.seed} if cfg.seed else {}
    return {"preset": cfg.preset} | (DATA.get(task, {}) if cfg.preset == "medium" else {}) | seed


def make_data(cfg, out):
    """Make the data of every task, all at once; return their folders."""
    wanted = {task: data_of(task, cfg) for task in cfg.task}
    folders = {task: out / "data" / f"{task}_{digest(about)}" for task, about in wanted.items()}
    jobs = [subprocess.Popen(
        [sys.executable, "-m", "ups.data", "make", task, "--out", str(folders[task]),
         *[item for key, value in about.items() for item in (f"--{key}", str(value))]], cwd=ROOT)
        for task, about in wanted.items()]
    if any([job.wait() for job in jobs]):
        raise UsageError("the data could not be made; the message above says why.")
    return folders


def gathered(folders, out):
    """One folder with links to the files of several."""
    together = out / "data" / ("joint_" + digest([str(folder) for folder in folders]))
    together.mkdir(parents=True, exist_ok=True)
    for file in [file for folder in folders for file in folder.iterdir()]:
        if not (together / file.name).exists():
            (together / file.name).symlink_to(file)
    return together


def reserve(folder):
    """Keep other calls from training the cell of `folder`, until the file returned is closed."""
    held = lock(folder.with_suffix(".lock"))
    if held is None:
        raise UsageError(f"{folder.name} is being trained by another call; run this one again when "
                         "that has ended, or give another --out.")
    return held


def launch(cell, folder):
    """Start a process for one cell."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir(parents=True)
    path = folder.with_suffix(".json")
    write_json(path, cell)
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "PYTHONPATH": str(ROOT)}
    if cell["device"] == "CPU":  # threads of several processes on a few cores wait for each other
        environment["OMP_NUM_THREADS"] = "1"
    with open(folder / "log.txt", "w") as log:
        code = "import sys; from benchmarks.accuracy import work; work(*sys.argv[1:])"
        return subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(os.getpid())], cwd=ROOT, stdout=log,
            stderr=log, env=os.environ | environment)


def main(argv=None):
    try:
        cfg = parse(Config, argv, __doc__)
    except UsageError as error:
        if "there is no field" not in str(error):
            raise
        raise UsageError(f"{error} Flags of a model go into its quotes: --models "
                         '"unet --lr 1e-3".') from None
    out, device = Path(cfg.out).resolve(), "CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {cfg.out}: it cannot be made ({error.strerror}).") from None
    tasks = list(dict.fromkeys(cfg.task))
    wanted = [(model, [task], cfg.seconds) for task, model in itertools.product(tasks, cfg.models)]
    if cfg.joint:  # first: it takes longest
        wanted.insert(0, (cfg.joint, tasks, cfg.seconds * len(tasks)))
    cells, names = {}, {}  # folder -> cell, and what this call names it: several may mean the same
    for model, some, seconds in wanted:
        cell = {"model": model, "kind": model.split()[0], "flags": flags_of(model, some),
                "tasks": some, "seconds": seconds, "seed": cfg.seed, "device": device,
                "split": cfg.split,
                "data": {task: data_of(task, cfg) for task in some}}
        try:
            key = digest(cell | {"model": "", "flags": "", "settings": settings(cell)})
        except UsageError as error:
            raise UsageError(f"{model}: {error}") from error
        folder = out / f"{'_'.join(some)}_{cell['kind']}_{key}"
        cells[folder] = cell
        names.setdefault(folder, []).append(
            model if len(some) == 1 else f"one {model} for {len(some)} tasks, {seconds:g} s")
    locks = {f: reserve(f) for f in cells if not (f / "result.json").exists()}
    todo = {f: cells[f] for f in locks if not (f / "result.json").exists()}  # now nobody else's
    folders = make_data(cfg, out) if todo else {}
    for cell in todo.values():
        some = [folders[task] for task in cell["tasks"]]
        cell["folder"] = str(some[0] if len(some) == 1 else gathered(some, out))
    if todo:
        print(f"models to train: {len(todo)}; logs: {out}/*/log.txt", file=sys.stderr)
    jobs, ended, shown = {}, set(), set()
    while len(shown) < len(tasks):
        busy = {folder for folder, job in jobs.items() if job.poll() is None}
        for folder in jobs.keys() - busy - ended:
            ended.add(folder)
            print(f"{len(ended)} of {len(todo)} have ended: {folder.name}", file=sys.stderr)
        waiting = [folder for folder in todo if folder not in jobs]
        for folder in waiting[: cfg.at_once - len(busy)]:
            jobs[folder] = launch(todo[folder], folder)
        for task in tasks:
            mine = [folder for folder, cell in cells.items() if task in cell["tasks"]]
            if task in shown or any(folder in busy or folder in waiting for folder in mine):
                continue
            shown.add(task)
            results = {name: read_json(f / "result.json")
                       for f in mine if (f / "result.json").exists() for name in names[f]}
            if results:
                report(task, results, out)
        time.sleep(0.2)
    for held in locks.values():
        held.close()
    failed = [folder for folder, job in jobs.items() if job.returncode]
    for folder in failed:
        tail = (folder / "log.txt").read_text().splitlines()[-3:]
        reason = " | ".join(tail) or f"it ended with {jobs[folder].returncode} and said nothing"
        reason = re.split(r"\w+Error: ", reason)[-1]  # no traceback where a sentence says it
        print(f"{folder.name} failed: {reason}", file=sys.stderr)
    if len(failed) < len(cells):
        print(NRMSE + ".")
    return bool(failed)


if __name__ == "__main__":
    command(main)
