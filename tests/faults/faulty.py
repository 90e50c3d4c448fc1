"""The miniature stage of tests/train/toy.py with faults put into it, several in one process group.

    faulty.py '[{"name": "a", ...}, {"name": "b", ...}]' [flags of toy.py]

Each scenario trains in RUN/NAME. Its keys say what goes wrong, at `step`, on `rank` (or on all):

    oom       "forward" | "backward", at `micro` (0 the first, -1 the last micro-batch), `times`
    raises    an exception in the loss: "ValueError", "UsageError"
    nan       the loss of one row is not a number;  nan_gradient: only its gradient
    worker    an exception in a loader's worker
    full      bytes that a file may have from `step` on, until `until`
    kill      a signal to this process: "SIGKILL", "SIGTERM"; `point` of a save instead of a step
    sleep     never answer again, until a signal
    hold      wait for a signal; a file `held` says that both ranks do
    restarts  so many times this launch kills a rank, one step later each time
    pace      seconds that every step takes longer

What each rank did goes to RUN/NAME/rankR.json, every collective to RUN/NAME/collectivesR.txt.
"""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import fsdp_on_cpu
import torch
import torch.distributed as dist
import toy

from ups import files
from ups.config import UsageError, command, parse
from ups.train import checkpoint, tracking
from ups.train import run as run_module
from ups.train.run import Run

COLLECTIVES = ("all_reduce", "broadcast", "broadcast_object_list", "monitored_barrier", "barrier",
               "all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "scatter",
               "reduce_scatter_tensor")
FULL_SIZE = resource.getrlimit(resource.RLIMIT_FSIZE)


class Fault:
    """One scenario on one rank: knows the step, the attempt and the micro-batch it is in."""

    def __init__(self, spec, rank):
        self.spec, self.step, self.done, self.fired = spec, 0, 0, 0
        self.mine = spec.get("rank", rank) == rank
        self.seen = []  # micro-batches, in rows, of every attempt

    def due(self, kind):
        return self.mine and self.spec.get(kind) and self.step == self.spec.get("step", 3)

    def memory(self, where, done, rows, share):
        """Run out of memory in the micro-batch that is asked for, in `times` attempts."""
        last = self.spec.get("micro", 0) == -1
        here = done + rows == share if last else done == 0
        if self.due("oom") and self.spec["oom"] == where and here:
            if self.fired < self.spec.get("times", 1):
                self.fired += 1
                raise torch.OutOfMemoryError("CUDA out of memory (put in by a test)")


class Touch(torch.autograd.Function):
    """The identity, with a fault in its backward."""

    @staticmethod
    def forward(ctx, x, fault, *place):
        ctx.fault, ctx.place = fault, place
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.fault.memory("backward", *ctx.place)
        if ctx.fault.due("nan_gradient"):
            grad = grad * float("nan")
        return grad, None, None, None, None


def faulty_loss(fault, share, real=toy.loss):
    def loss(model, chunk):
        rows = len(chunk["z"])
        if chunk["first"][0]:
            fault.done = 0  # a new attempt
        place = fault.done, rows, share
        fault.seen.append(rows)
        fault.memory("forward", *place)
        if fault.due("raises"):
            kind = {"ValueError": ValueError, "UsageError": UsageError}[fault.spec["raises"]]
            raise kind("put in by a test; no cure.")
        values = Touch.apply(real(model, chunk), fault, *place)
        if fault.due("nan"):
            values = values * torch.tensor([float("nan")] + [1.0] * (rows - 1))
        fault.done += rows
        return values

    return loss


class Windows(toy.Windows):
    """A data set that fails where the scenario says so, in a loader's worker too."""

    fault = None

    def __getitems__(self, triples):
        batch = super().__getitems__(triples)
        batch["first"] = torch.tensor([row % (12 // WORLD) == 0 for _, row, _ in triples])
        spec = self.fault.spec
        if spec.get("worker") and batch["step"] + 1 == spec["step"] and self.fault.mine:
            raise KeyError("no such window (put in by a test)")
        return batch


def record(path):
    """From now on write down every collective that this rank enters, before it does."""
    def wrap(name, real):
        def call(*args, **options):
            what = args[0] if args else None
            shape = f"{tuple(what.shape)} {what.dtype}" if torch.is_tensor(what) else ""
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, FULL_SIZE)  # our own file has room
            with path.open("a") as file:
                file.write(f"{name} {shape}\n")
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            return real(*args, **options)

        call.real = real
        return call

    for name in COLLECTIVES:
        real = getattr(dist, name)
        setattr(dist, name, wrap(name, getattr(real, "real", real)))


def kill_in_save(point, number):
    """Die, or stand still, in a save: half written, complete but unnamed, named but unpruned."""
    real_save, real_flush = checkpoint.save_file, files.flush

    def save_file(tensors, path):
        real_save(tensors, path)
        if point == "half":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), number)

    def flush(path):
        real_flush(path)
        if path.name == {"unnamed": f"step_{SAVED}.partial", "unpruned": "checkpoints"}.get(point):
            os.kill(os.getpid(), number)

    checkpoint.save_file, files.flush = save_file, flush


def turns(run, fault):
    """Call this at the start of every step: what happens to the process and not to the loss."""
    def start(step):
        global SAVED
        fault.step = SAVED = step
        spec = fault.spec
        time.sleep(spec.get("pace", 0))
        if fault.due("hold"):
            (run.folder / f"held{run.accelerator.process_index}").write_text("yes")
            while not run.stop_requested:
                time.sleep(0.02)
        if fault.due("kill") and "point" not in spec:
            os.kill(os.getpid(), getattr(signal, spec["kill"]))
        if fault.due("kill") and "point" in spec:
            kill_in_save(spec["point"], getattr(signal, spec["kill"]))
        if fault.due("sleep"):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10_000)
        if fault.mine and step == spec.get("step") and "full" in spec:
            resource.setrlimit(resource.RLIMIT_FSIZE, (spec["full"], FULL_SIZE[1]))
        if fault.mine and step == spec.get("until"):
            resource.setrlimit(resource.RLIMIT_FSIZE, FULL_SIZE)

    real = run.progress

    def progress(loader):
        for batch in real(loader):
            start(run.step)
            yield batch

    run.progress = progress


def play(spec, cfg):
    """Train once with the scenario's fault; return what this rank saw."""
    global WORLD
    cfg = dataclasses.replace(cfg, run=f"{cfg.run}/{spec['name']}",
                              workers=spec.get("workers", 0), **spec.get("flags", {}))
    run = Run(cfg, "toy")
    rank, WORLD = run.accelerator.process_index, run.accelerator.num_processes
    folder = Path(cfg.run)
    fault = Fault(spec, rank)
    toy.loss = faulty_loss(fault, cfg.batch_size // WORLD)
    Windows.fault, toy.Windows = fault, Windows
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    seen = {"world": WORLD, "error": None, "weights": None, "previous": run.previous}
    record(folder / f"collectives{rank}.txt")
    turns(run, fault)
    error = None
    try:
        model, _, _ = toy.train(run, cfg)
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        seen["weights"] = torch.cat([p.detach().flatten() for p in whole]).tolist()
    except Exception as caught:
        error = caught
        seen["error"] = f"{type(caught).__name__}: {caught}"
    resource.setrlimit(resource.RLIMIT_FSIZE, FULL_SIZE)
    if hasattr(run, "backward"):
        seen |= {"micro_batch": run.backward.micro_batch, "splits": run.backward.splits}
    seen |= {"rows": fault.seen, "last_saved": run.last_saved, "step": run.step}
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    return run, error


def main():
    run_module.REPEATS = tracking.PATIENCE = 600  # seconds: other people load the machine
    specs, cfg = json.loads(sys.argv[1]), parse(toy.Config, sys.argv[2:])
    with fsdp_on_cpu.strategy("fsdp") if os.environ.get("SHARDED") else contextlib.nullcontext():
        play_all(specs, cfg)


def play_all(specs, cfg):
    for spec in specs:
        count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if count < spec.get("restarts", 0):
            spec |= {"kill": "SIGKILL", "rank": count % 2, "step": count + 2}
        run, error = play(spec, cfg)
        if spec is specs[-1]:
            run.__exit__(type(error), error, None)
            if error is not None:
                raise error
        elif error is None:  # `__exit__` would end the process group
            run._end("done", "", code=0)
            run.agree.close()
            if run.lock:
                run.lock.close()
        else:
            run.__exit__(type(error), error, None)
            error = error.with_traceback(None)  # it holds the loop, which holds signal handlers


if __name__ == "__main__":
    command(main)
