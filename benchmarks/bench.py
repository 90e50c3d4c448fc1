"""What the benchmarks share: tables, processes, and trainings whose steps are timed first."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from ups.config import RunError

ROOT = Path(__file__).resolve().parent.parent
MARK = "UPS_BENCHMARK"  # in the environment of all that one benchmark starts
CHILD = {"ACCELERATE_MIXED_PRECISION": "no",  # a training that ends with its parent
         MARK: str(os.getpid())} | os.environ
MOMENTS, VAL = 8, 32  # validations during a training, trajectories of each
WARMUP = 0.02         # share of the steps
UNTESTED = {  # neither validation nor test of a stage
    "validate": lambda *args: {"val/nrmse_rollout": math.inf}, "test_operator": lambda *args: None,
    "validate_ensemble": lambda *args: {"val/crps_ratio": math.inf},
    "finish_ensembles": lambda *args: None}


# tables in Markdown, every row printed as soon as it is measured
def row(first, *cells, width=36):
    print(f"| {first:{width}} | {' | '.join(f'{cell:>9}' for cell in cells)} |", flush=True)


def heading(title, *columns, width=36):
    print(f"\n{title}\n")
    row(*columns, width=width)
    row(*["---"] * len(columns), width=width)


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


# processes
def argv(values):
    """`{"lr": 1e-3, "tasks": ["a", "b"], "compile": True}` as the flags of a command line."""
    words = []
    for key, value in values.items():
        many = value if isinstance(value, list | tuple) else [value]
        words += [f"--{'' if value else 'no-'}{key}"] if isinstance(value, bool) else [
            f"--{key}", *map(str, many)]
    return words


def digest(value):
    """Twelve letters that change with a plain value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def call(log, *words):
    """Run Python on some words; its output goes to the file `log`, or here where that is None."""
    if log:
        print(f"see {log}", file=sys.stderr)
        log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w") if log else contextlib.nullcontext() as file:
        code = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, stdout=file,
                              stderr=file, env=CHILD).returncode
    if code and not log:
        raise RunError("a command failed; the message above says why.")
    if code:
        said = log.read_text(errors="replace").splitlines() or [""]
        reasons = [text for text in said if text.startswith("error: ")] or said
        raise RunError(f"it ended with {code}: {reasons[-1]} (all of it: {log})")


@contextlib.contextmanager
def alone():
    """Whatever else this benchmark has started stands still, so that a few steps can be timed."""
    mark, others = f"{MARK}={os.environ.get(MARK)}".encode(), []
    with open(Path(tempfile.gettempdir()) / mark.decode(), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for path in Path("/proc").glob("[0-9]*/environ") if MARK in os.environ else ():
            with contextlib.suppress(OSError):
                if int(path.parent.name) != os.getpid() and mark in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGSTOP)
                    others.append(int(path.parent.name))
        try:
            yield
        finally:
            for pid in others:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)


# trainings
def run(script, words, **names):
    """`script.main(words)`, while `names` stand in for the script's own."""
    before = {name: getattr(script, name) for name in names}
    vars(script).update(names)
    try:
        script.main(words)
    finally:
        vars(script).update(before)
        AcceleratorState._reset_state(reset_partial_state=True)


def speed(script, words, steps, **names):
    """Steps per second of a script's loop, over the last `steps` steps of a training."""
    stamps = []

    class Timed(script.Run):
        def progress(self, loader):
            with contextlib.ExitStack() as turn:
                for batch in super().progress(loader):
                    if self.cfg.steps - self.step in (0, steps):
                        if not stamps:
                            turn.enter_context(alone())
                        if torch.cuda.is_available():
                            torch.cuda.synchronize()
                        stamps.append(time.perf_counter())
                    yield batch

    run(script, words, Run=Timed, **names)
    return steps / (stamps[1] - stamps[0])


def trial_steps(cuda):
    """Steps that compile, and steps that are timed after them."""
    return (20, 200) if cuda else (2, 10)


def steps_within(seconds, step):
    """How many steps of `step` seconds take `seconds`."""
    return max(8, round(seconds / step))


def step_seconds(script, words, graphs=1):
    """Seconds of a step of a training with the flags `words(steps)`, which captures so many CUDA
    graphs; neither validation nor test is in it."""
    few, timed = trial_steps(torch.cuda.is_available())
    few *= graphs
    names = {name: nothing for name, nothing in UNTESTED.items() if hasattr(script, name)}
    return 1 / speed(script, words(few + timed), timed, **names)


def flags(steps, moments=1, **more):
    """The flags of a training of so many steps, validated so often."""
    return argv({"steps": steps, "eval_every": -(-steps // moments), "save_every": steps,
                 "log_every": max(1, steps // 20), "warmup": max(1, round(WARMUP * steps)),
                 "compile": torch.cuda.is_available()} | more)


def train_operator(log, run, data, seed, flags):
    """The operator by its own script."""
    call(log, "train_operator.py", "--run", run, "--data", data, "--cache", run.parent / "cache",
         "--seed", seed, *flags, *["--compile"] * torch.cuda.is_available())
