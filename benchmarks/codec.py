"""Compression against accuracy: the learned codec beside the patch codec of the same width.

    python -m benchmarks.codec [--tasks burgers1d diffreact2d ns2d] [--steps 3000] [--folder DIR]

Makes the data where they are missing, trains `train_codec.py` once for every task and compression,
and prints test nRMSE of decode(encode(u)) for both codecs. burgers1d keeps every fourth of 1024
points.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

import train_codec
from benchmarks import bench
from benchmarks.bench import device_name, heading, row
from ups.config import UsageError, command, parse
from ups.data.make import make
from ups.files import read_json

DATA = {  # settings of the data, strides, patch, widths
    "burgers1d": (dict(samples=1000, grid=1024, frames=41, nu=0.001), 4, 8, (2, 1)),
    "diffreact2d": (dict(samples=400, grid=64, frames=41), 1, 4, (8, 4, 2)),
    "ns2d": (dict(samples=400, grid=64, frames=21), 1, 4, (8, 4, 2)),
}


@dataclass(frozen=True)
class Config:
    tasks: tuple[str, ...] = tuple(DATA)  # some of burgers1d, diffreact2d, ns2d
    steps: int = 3000              # of each training
    folder: str = "/tmp/ups_codec"  # for data, caches and runs

    def __post_init__(self):
        if wrong := set(self.tasks) - DATA.keys():
            raise UsageError(f"--tasks {min(wrong)}: it is one of {', '.join(DATA)}.")


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    folder = Path(cfg.folder)
    heading(f"test nRMSE of decode(encode(u)); {cfg.steps} steps, {device_name()}", "task, patch",
            "width", "compression", "patch", "grid", "ratio", "seconds")
    for task in cfg.tasks:
        about, stride, patch, widths = DATA[task]
        make(task, out=folder / "data" / task, **about)
        for width in widths:
            run, begin = folder / "runs" / f"{task}_{patch}_{width}", time.perf_counter()
            words = {"run": run, "data": folder / "data" / task, "cache": folder / "cache",
                     "tasks": task, "stride_x": stride, "patch": patch, "width": width,
                     "steps": cfg.steps, "eval_every": max(1, cfg.steps // 2),
                     "save_every": cfg.steps, "batch_size": 64, "points": 128,
                     "compile": torch.cuda.is_available()}
            bench.run(train_codec, bench.argv(words))
            test = read_json(run / "codec" / task / "test.json")["tasks"][task]
            row(f"{task}, {patch}", width, f"{test['compression']:g}", f"{test['nrmse_patch']:.2e}",
                f"{test['nrmse_grid']:.2e}", f"{test['nrmse_patch'] / test['nrmse_grid']:.1f}",
                f"{time.perf_counter() - begin:.0f}")


if __name__ == "__main__":
    command(main)
