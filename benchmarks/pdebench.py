"""The published tasks at their full size, by the published protocol: one row of a table for each.

    python -m benchmarks.pdebench --task burgers1d advection1d
    python -m benchmarks.pdebench --task swe2d --flags="--size l"

Data, training by `train_operator.py --size m` with the published strides, `evaluate.py --protocol
pdebench`. What is finished is not done again (`train s` is then nan). Ten frames are given, of
which the operator sees the last; darcy2d is one step. The goals are what a carefully retrained FNO
reaches (for diffreact2d, where that was on easier strides, a tenth of the first one).
"""

import dataclasses
import math
import shlex
import time
from pathlib import Path

import torch

import train_operator
from benchmarks.bench import argv, call, heading, row
from ups.config import UsageError, command, parse
from ups.eval.metrics import NRMSE
from ups.files import read_json

STRIDES = "--stride_x 4 --stride_t 5"
ROWS = {  # task -> (flags of make, published strides, goal)
    "burgers1d": ("--nu 0.001", STRIDES, 1.1e-2),
    "advection1d": ("--beta 0.4", STRIDES, 4.6e-3),
    "diffreact2d": ("", "", 1.2e-2),
    "swe2d": ("", "", 1.9e-3),
    "darcy2d": ("--beta 1.0", "", 2.8e-2),
}


@dataclasses.dataclass(frozen=True)
class Config:
    task: tuple[str, ...] = tuple(ROWS)  # some of burgers1d advection1d diffreact2d swe2d darcy2d
    flags: str = "--size m"              # for train_operator.py, beside the strides
    preset: str = "pdebench"             # small, to try it out: not comparable
    out: str = "benchmarks/results/pdebench"  # data, runs and logs

    def __post_init__(self):
        for task in self.task:
            if task not in ROWS:
                raise UsageError(f"--task {task}: it is one of {', '.join(ROWS)}.")


def training(task, cfg, out):
    """The command line of train_operator.py; of a flag that comes twice the last one wins."""
    strides = {} if cfg.preset == "pdebench" else {"stride_x": 1, "stride_t": 1}
    given = {"run": out / "runs" / task, "data": out / "data" / task, "cache": out / "cache",
             "tasks": task, "eval_every": 5000, "save_every": 5000,
             "compile": torch.cuda.is_available()}
    return [*argv(given), *shlex.split(ROWS[task][1]), *argv(strides),
            *shlex.split(cfg.flags)]


def measure(task, cfg, out):
    """Data, training and evaluation of one task: the operator's nRMSE and interval, seconds."""
    run = out / "runs" / task
    call(out / f"{task}.make.txt", "-m", "ups.data", "make", task, "--preset", cfg.preset, "--out",
         out / "data" / task, *shlex.split(ROWS[task][0]))
    begin = math.nan if run.exists() else time.perf_counter()  # of a part it would mislead
    call(out / f"{task}.train.txt", "train_operator.py", *training(task, cfg, out))
    seconds = time.perf_counter() - begin
    path = run / "evaluation_pdebench" / "metrics.json"
    if not path.exists():
        call(out / f"{task}.evaluate.txt", "evaluate.py", "--run", run, "--protocol", "pdebench")
    result = read_json(path)["tasks"][task]
    return result["forecasts"]["operator"]["scores"]["nrmse"], result["protocol"], seconds


def main(words=None):
    cfg = parse(Config, words, __doc__)
    out = Path(cfg.out).resolve()
    for task in cfg.task:  # before any work
        parse(train_operator.Config, training(task, cfg, out))
    heading(f"{NRMSE}.", "task", "nRMSE", "95 % interval", "goal", "train s", "protocol")
    for task in cfg.task:
        score, protocol, seconds = measure(task, cfg, out)
        low, high = score["interval"]
        row(task, f"{score['all']:.2e}", f"{low:.2e} to {high:.2e}", f"{ROWS[task][2]:.1e}",
            f"{seconds:.0f}", protocol)


if __name__ == "__main__":
    command(main)
