"""`--dry_run`: look before an expensive run.

It takes the last steps of the run, with an evaluation and a checkpoint at the end, in a folder of
its own, and says what the run will need. What it leaves are data, codec and cache. Exit codes as
of a run, and one sentence that says what to change.
"""

import contextlib
import itertools
import resource
import shutil
import sys
from pathlib import Path

import torch

from ups.config import UsageError
from ups.train.checkpoint import checkpoints
from ups.train.ranks import PeerFailed, Stopped, now, on_main
from ups.train.step import is_out_of_memory

GIB = 2**30


class DryRunDone(Exception):
    """The dry run is over; its message is the fault that it found, or empty."""


def length(run):
    """Steps to take: of each task a first one and a second, with graphs two warm-ups, a capture
    and a replay; and the last, which evaluates."""
    tasks = len(run.sampler.sizes)
    return max(8, (4 if run.graphs else 2) * tasks + 1)


def step_seconds(times, tasks):
    """The mean over a round of the tasks, each at its quickest, from the seconds before each step
    and after the last, which evaluates and saves: it does not count."""
    steps = [b - a for a, b in itertools.pairwise(times)]
    steps = steps[:-1] or steps
    quickest = [min(steps[i::tasks]) for i in range(min(tasks, len(steps)))]
    return sum(quickest) / len(quickest)


def report(run):
    """Print what the run needs, on every rank's behalf, and raise `DryRunDone`."""
    device = run.accelerator.device
    peak = (torch.cuda.max_memory_allocated() if device.type == "cuda" else
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    peaks = run.accelerator.gather(torch.tensor([peak], device=device)).tolist()
    times = [*run.step_times, now()]
    raise DryRunDone(on_main(run.accelerator, _table, run, times, peaks))


def _table(run, times, peaks):
    """Print the needs (main process); return the fault of the disk, if there is one."""
    found = checkpoints(run.folder / "checkpoints")
    if not found:
        return "the checkpoint cannot be written: make room, or put --run on another disk."
    cfg, size = run.cfg, sum(file.stat().st_size for file in found[0].iterdir())
    need, free = size * (cfg.keep + 1) / GIB, shutil.disk_usage(run.folder).free / GIB
    seconds = step_seconds(times, len(run.sampler.sizes))
    last = times[-1] - times[-2] - seconds  # evaluation and checkpoint
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
{free:.1f} GiB free""", flush=True)
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
    """Remove the folder and exit, with a sentence; what is a bug keeps its traceback."""
    main, text, code = run.accelerator.is_main_process, str(error), 1
    if main:
        shutil.rmtree(run.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder stays where it holds anything
            run.folder.parent.rmdir()
            Path(run.cfg.run).rmdir()
    if is_out_of_memory(error):
        rows, main = getattr(getattr(run, "backward", None), "micro_batch", 0), True
        cure = f"use --micro_batch {rows // 2}" if rows > 1 else "a smaller model or batch will fit"
        text = f"rank {run.accelerator.process_index} is out of memory at {rows} rows: {cure}."
    elif isinstance(error, DryRunDone):
        code = int(bool(text))
        run.accelerator.end_training()
    elif isinstance(error, UsageError | Stopped):
        code = 2 if isinstance(error, UsageError) else 143
    elif not isinstance(error, PeerFailed | FloatingPointError):
        return
    if main and not isinstance(error, PeerFailed):
        print(f"error: {text}" if text else "all is well.", file=sys.stderr)
    sys.exit(code)
