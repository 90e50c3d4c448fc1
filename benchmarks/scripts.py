"""Run a script of this project inside a benchmark, with other names in it to watch it.

As a command, `python benchmarks/scripts.py STEPS FLAGS` prints the speed of the `train_operator.py`
that PYTHONPATH finds, which may be another checkout's.
"""

import importlib
import os
import sys
import time

import torch
from accelerate.state import AcceleratorState

CHILD = {"ACCELERATE_MIXED_PRECISION": "no"} | os.environ  # a training that ends with its parent


def argv(values):
    """`{"lr": 1e-3, "tasks": ["a", "b"], "compile": True}` as the flags of a command line."""
    words = []
    for key, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        else:
            words += [f"--{key}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


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
            for batch in super().progress(loader):
                if self.cfg.steps - self.step in (0, steps):
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    stamps.append(time.perf_counter())
                yield batch

    run(script, words, Run=Timed, **names)
    return steps / (stamps[1] - stamps[0])


if __name__ == "__main__":
    print(speed(importlib.import_module("train_operator"), sys.argv[2:], int(sys.argv[1])))
