"""The operator as one of the models of benchmarks/accuracy.py: by its own script, watched."""

import contextlib
import math

import torch
from accelerate.state import AcceleratorState

import train_operator as script
from benchmarks.baselines import MOMENTS, VAL, WARMUP
from benchmarks.turns import CHUNK, TIMED, step_seconds, steps_within
from ups.config import parse
from ups.eval.rollout import measure
from ups.train.ranks import now
from ups.train.step import Backward

GIVEN = {  # fields of train_operator.Config that the benchmark sets
    "tasks", "data", "cache", "run", "steps", "warmup", "eval_every", "save_every", "log_every",
    "val_trajectories", "compile", "dry_run", "seed"}


@contextlib.contextmanager
def swapped(module, **names):
    """Watch a script from outside: other names in it, for a while."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def chunk_of(cfg, cuda):
    """Steps that are timed together: whole rounds of all tasks."""
    count = len(cfg.tasks)
    return -(-(CHUNK if cuda else 1) // count) * count


def train_operator(cell, folder, turns):
    """`train_operator.main` twice: a few steps that compile and are timed, then the training."""
    cuda, alone = torch.cuda.is_available(), contextlib.ExitStack()
    own = [*cell["flags"], "--tasks", *cell["tasks"]]
    chunk = chunk_of(parse(script.Config, own), cuda)
    few, begin = (1 + TIMED) * chunk, chunk
    marks, curve, result = [], [], {}

    class Watched(Backward):
        def __call__(self, batch):
            """Compile and capture first: gradients alone, which are overwritten."""
            result.setdefault("compile_s", -now())  # until the steps are timed
            if batch["task"] not in vars(self).setdefault("seen", set()):
                self.seen.add(batch["task"])
                with turns.outside():
                    for _ in range(4 if cuda else 1):
                        super().__call__(batch)
            self.watch(batch)
            return super().__call__(batch)

    class Probed(Watched):
        def watch(self, batch):
            if batch["step"] == begin:
                result["compile_s"] += now()
                alone.enter_context(turns.alone())
            if batch["step"] >= begin and batch["step"] % chunk == 0:
                marks.append((batch["step"], now()))

    class Paused(Watched):
        def watch(self, batch):
            turns.step()

    def probe_end(*args):
        marks.append((few, now()))
        alone.close()
        return {"val/nrmse_rollout": math.inf}

    class Run(script.Run):
        def log(self, scores):
            if "val/nrmse_rollout" in scores:
                curve.append((self.step * step, scores["val/nrmse_rollout"]))
            super().log(scores)

    def finish(run, model, tasks):
        result["parameters"] = sum(p.numel() for p in model.parameters())
        result["tables"] = {}
        for index, task in enumerate(tasks):
            tables = measure(run.accelerator, model, task, index, cell["split"])
            result["tables"][task.name] = {"rollout": tables["operator"],
                                           "one_step": tables["one_step"]}

    def main(name, steps, moments, **names):
        flags = {"run": folder / name, "steps": steps, "eval_every": -(-steps // moments),
                 "save_every": steps, "log_every": max(1, steps // 20), "val_trajectories": VAL,
                 "warmup": max(1, round(WARMUP * steps)),
                 "cache": folder / "cache", "data": cell["folder"], "seed": cell["seed"]}
        argv = [item for key, value in flags.items() for item in (f"--{key}", str(value))]
        with swapped(script, **names):
            script.main([*own, *argv, *["--compile"] * cuda])
        AcceleratorState._reset_state(reset_partial_state=True)

    with alone:
        main("probe", few, 1, Backward=Probed, evaluate=probe_end, finish_operator=lambda *a: None)
    step = step_seconds(marks)
    steps = steps_within(cell["seconds"], step)
    main("run", steps, MOMENTS, Backward=Paused, Run=Run, finish_operator=finish)
    return {"steps": steps, "curve": curve, "step_ms": 1e3 * step,
            "batch_size": parse(script.Config, own).batch_size} | result
