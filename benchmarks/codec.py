"""Compression against accuracy: the learned codec beside the patch codec of the same width.

    python -m benchmarks.codec [--tasks burgers1d diffreact2d ns2d] [--steps 3000] [--folder DIR]

Makes the data where they are missing, trains `train_codec.py` once for every task and compression,
and prints test nRMSE of decode(encode(u)) for both codecs, and, for burgers1d (trained on every
fourth of 1024 points), the error of reading all 1024 points.
"""

import json
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

import train_codec
from ups.config import Parser, command
from ups.data.make import make

DATA = {  # settings of the data, strides, patch, widths
    "burgers1d": (dict(samples=1000, grid=1024, frames=41, nu=0.001), 4, 8, (2, 1)),
    "diffreact2d": (dict(samples=400, grid=64, frames=41), 1, 4, (8, 4, 2)),
    "ns2d": (dict(samples=400, grid=64, frames=21), 1, 4, (8, 4, 2)),
}


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(DATA), choices=list(DATA))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--samples", type=int, help="fewer samples than the benchmark's own")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--folder", default="/tmp/ups_codec", help="for data, caches and runs")
    args = parser.parse_args()
    rows, folder = [], Path(args.folder)
    for task in args.tasks:
        settings, stride, patch, widths = DATA[task]
        if args.samples:
            settings = settings | {"samples": args.samples}
        make(task, out=folder / "data", **settings)
        for width in widths:
            run, begin = folder / "runs" / f"{task}_{patch}_{width}", time.perf_counter()
            flags = {"run": run, "data": folder / "data", "cache": folder / "cache", "tasks": task,
                     "stride_x": stride, "patch": patch, "width": width, "steps": args.steps,
                     "eval_every": max(1, args.steps // 2), "save_every": args.steps,
                     "batch_size": args.batch_size, "model.hidden": args.hidden,
                     "model.depth": args.depth, "points": 128}
            argv = [item for key, value in flags.items() for item in (f"--{key}", str(value))]
            train_codec.main([*argv, *["--compile"] * torch.cuda.is_available()])
            AcceleratorState._reset_state(reset_partial_state=True)
            test = json.loads((run / "codec" / task / "test.json").read_text())["tasks"][task]
            rows.append((task, patch, width, test, time.perf_counter() - begin))

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\ntest nRMSE of decode(encode(u)); {args.steps} steps, {device}")
    print("| task | patch | width | compression | patch codec | grid codec | ratio | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for task, patch, width, test, seconds in rows:
        ratio = test["nrmse_patch"] / test["nrmse_grid"]
        print(f"| {task} | {patch} | {width} | {test['compression']:g} | {test['nrmse_patch']:.2e} "
              f"| {test['nrmse_grid']:.2e} | {ratio:.1f} | {seconds:.0f} |")
    for task, _, width, test, _ in rows:
        if "any_point" in test:
            values = ", ".join(f"{name} {value:.2e}" for name, value in test["any_point"].items())
            print(f"{task}, width {width}, read at all points of the stored grid: {values}")


if __name__ == "__main__":
    command(main)
