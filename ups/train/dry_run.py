"""Look before an expensive run: `--dry_run` says what it needs, `--minutes` how long it may be.

Both take a few steps, with a validation and a checkpoint after the last one. A dry run does so in a
folder of its own, prints what it saw and leaves data, codec and cache. Before a run of so many
minutes the steps are undone, and the schedule gets as many as there is time for.
"""

import contextlib
import itertools
import resource
import shutil
import sys
from pathlib import Path

import torch

from ups.config import RunError, UsageError
from ups.train import cost
from ups.train.checkpoint import checkpoints
from ups.train.ema import local, reshard
from ups.train.ranks import everyone, now, on_main
from ups.train.step import is_out_of_memory
from ups.train.tracking import Metrics

GIB = 2**30
TEST = 10  # times as long as a validation, about


class DryRunDone(RunError):
    """The dry run is over; its message is the fault that it found, or empty."""


def length(run):
    """Steps to take: of each task a first one and a second, with graphs two warm-ups, a capture
    and a replay; and the last, which evaluates."""
    return max(8, (4 if run.graphs else 2) * len(run.sampler.sizes) + 1)


def step_seconds(times, tasks):
    """The mean over a round of the tasks, each at its quickest, from the seconds before each step
    and after the last, which evaluates and saves: it does not count."""
    steps = [b - a for a, b in itertools.pairwise(times)]
    steps = steps[:-1] or steps
    quickest = [min(steps[i::tasks]) for i in range(min(tasks, len(steps)))]
    return sum(quickest) / len(quickest)


def measure(run, steps):
    """Take the last steps of a run; return the seconds of one, and of validation and checkpoint."""
    run.step = run.sampler.start = max(0, run.cfg.steps - length(run))
    times = []
    for batch in steps:
        times.append(now())
        yield batch
    times.append(now())
    seconds = step_seconds(times, len(run.sampler.sizes))
    return seconds, times[-1] - times[-2] - seconds


@contextlib.contextmanager
def undone(run):
    """What is done in here to weights, averages and moments is undone, in the same memory."""
    model, ema, optimizer = (run.parts[name] for name in ("model", "ema", "optimizer"))
    weights, folder, metrics = local(model.parameters()), run.folder, run.metrics
    begin, run.folder = [p.clone() for p in weights], folder / "trial"
    run.metrics = Metrics(run.folder / "metrics.jsonl")
    if run.accelerator.is_main_process:
        run.folder.mkdir(exist_ok=True)
        print(f"--minutes {run.cfg.minutes:g}: a few steps are timed and undone.")
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if run.accelerator.is_main_process:
            shutil.rmtree(run.folder)
        run.folder, run.metrics = folder, metrics
    with torch.no_grad():
        for tensors in (weights, local(ema.shadow), local(ema.best)):
            torch._foreach_copy_(tensors, begin)
    reshard(model)
    for moment in itertools.chain(*(state.values() for state in optimizer.state.values())):
        moment.zero_()  # as they begin
    ema.updates.zero_()
    ema.best_score, run.last_saved = float("inf"), None
    run.step = run.sampler.start = 0


def fit_minutes(run, seconds, last, passed):
    """Give the run the steps for which `--minutes` leaves time, the test included."""
    cfg, left = run.cfg, 60 * run.cfg.minutes - passed - (TEST + 1) * last
    steps = int(left / (seconds + last / min(cfg.eval_every, cfg.save_every)))
    steps = everyone(run.accelerator, steps)[0]
    if steps < 1:
        raise UsageError(f"--minutes {cfg.minutes:g}: {passed / 60:.1f} have passed before the "
                         "first step, and validation and test take the rest; give more.")
    object.__setattr__(cfg, "steps", steps)  # what alone is not known from the start
    run.sampler.steps = steps
    if run.accelerator.is_main_process:
        print(f"--minutes {cfg.minutes:g} leaves time for --steps {steps}.")


def report(run, seconds, last):
    """Print what the run needs, on every rank's behalf, and raise `DryRunDone`."""
    peak = (torch.cuda.max_memory_allocated() if run.accelerator.device.type == "cuda" else
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    peaks = everyone(run.accelerator, peak)
    needs = cost.sizes(run)
    inside = cost.bandwidth(run.accelerator, needs[0])
    strategy = "FSDP2" if run.backward.sharded else "DDP"
    costs = cost.table(seconds, max(peaks), *needs, inside, len(peaks), strategy)
    raise DryRunDone(on_main(run.accelerator, _table, run, seconds, last, peaks, costs))


def _table(run, seconds, last, peaks, costs):
    """Print the needs (main process); return the fault of the disk, if there is one."""
    found = checkpoints(run.folder / "checkpoints")
    if not found:
        return "the checkpoint cannot be written: make room, or put --run on another disk."
    cfg, size = run.cfg, sum(file.stat().st_size for file in found[0].iterdir())
    need, free = size * (cfg.keep + 1) / GIB, shutil.disk_usage(run.folder).free / GIB
    total = seconds * cfg.steps + last * (cfg.steps // min(cfg.eval_every, cfg.save_every) + 1)
    memory = ", ".join(f"rank {rank} {peak / GIB:.2f} GiB" for rank, peak in enumerate(peaks))
    share, device = cfg.batch_size // len(peaks), run.accelerator.device.type
    print(f"""
dry run of {run.stage}: {len(peaks)} process{"es" * (len(peaks) > 1)}, {device}
  seconds per step       {seconds:.4f}
  evaluation, checkpoint {last:.2f} s each time
  total                  at most {total / 60:.1f} minutes for {cfg.steps} steps
  peak memory            {memory}
  micro-batch            {run.backward.micro_batch} rows fit, of {share} per process
  checkpoint             {size / 2**20:.1f} MiB, {cfg.keep} kept: {need:.2f} GiB needed, \
{free:.1f} GiB free

predicted for N GPUs with {share} rows each (ups/train/cost.py):
{costs}""", flush=True)
    return "" if need <= free else (f"checkpoints need {need:.1f} GiB and {free:.1f} GiB are free: "
                                    "lower --keep, or put --run on a larger disk.")


def clear(folder):
    """Forget what a dry run that was killed has left; its lock is ours now (main process)."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def end(run, error):
    """Remove the folder, and say what was found: `command` prints an error's sentence."""
    if run.accelerator.is_main_process:
        shutil.rmtree(run.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder stays where it holds anything
            run.folder.parent.rmdir()
            Path(run.cfg.run).rmdir()
    if is_out_of_memory(error):
        rows = getattr(getattr(run, "backward", None), "micro_batch", 0)
        cure = f"use --micro_batch {rows // 2}" if rows > 1 else "a smaller model or batch will fit"
        raise RunError(f"rank {run.accelerator.process_index} is out of memory at {rows} rows: "
                       f"{cure}.") from None
    if isinstance(error, DryRunDone):
        run.accelerator.end_training()
        if not str(error):
            if run.accelerator.is_main_process:
                print("all is well.", file=sys.stderr)
            sys.exit(0)
