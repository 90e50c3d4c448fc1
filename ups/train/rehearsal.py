"""`--dry_run` and `--debug`: look before an expensive run, and look into one that fails.

A rehearsal takes the last steps of the run (the longest unroll), with an evaluation and a
checkpoint at the end, in a folder of its own, and says what the run will need.
"""

import contextlib
import faulthandler
import resource
import shutil
import sys
import time

import torch

from ups.train.checkpoint import checkpoints, damage

STEPS = 8  # of a rehearsal; the first ones compile and warm up
TRACED = range(3, 6)  # steps in the profiler's trace, counted from the start of the process


class Rehearsed(Exception):
    """The rehearsal is over; its message is the fault that it found, or empty."""


class Clock:
    """Time the steps of a rehearsal: the last two before the one that evaluates and saves."""

    def __init__(self, run):
        self.run, self.marks = run, []

    def tick(self):
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.marks.append(time.perf_counter())

    def step_seconds(self):
        steps = [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return min(steps[:-1] or steps)


def report(run, clock, batch):
    """Print what the run needs, on every rank's behalf, and raise `Rehearsed`."""
    accelerator, cfg, folder = run.accelerator, run.cfg, run.folder
    cuda = accelerator.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(
        resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = accelerator.gather(torch.tensor([peak], device=accelerator.device)).tolist()
    rows = largest_micro_batch(run.backward, batch) if cuda else len(batch["rows"])
    if not accelerator.is_main_process:
        raise Rehearsed("")
    newest = checkpoints(folder / "checkpoints")[0]
    fault = damage(newest)
    size = sum(file.stat().st_size for file in newest.iterdir())
    free = shutil.disk_usage(folder).free
    need = size * (cfg.keep + 1)
    seconds = clock.step_seconds()
    last = clock.marks[-1] - clock.marks[-2] - seconds  # evaluation and checkpoint
    total = seconds * cfg.steps + last * (cfg.steps // cfg.eval_every + 1)
    memory = ", ".join(f"rank {rank} {peak / 2**30:.2f} GiB" for rank, peak in enumerate(peaks))
    print(f"""
rehearsal of {run.stage}: {accelerator.num_processes} processes, {accelerator.device.type}
  seconds per step       {seconds:.4f} at the longest unroll
  evaluation, checkpoint {last:.2f} s each time
  total                  {total / 60:.1f} minutes for {cfg.steps} steps
  peak memory            {memory}
  micro-batch            {run.backward.micro_batch} rows used; about {rows} fit
  checkpoint             {size / 2**20:.1f} MiB, {cfg.keep} kept: {need / 2**30:.2f} GiB needed, \
{free / 2**30:.1f} GiB free
  round trip             {"exact" if fault is None else fault}""")
    if fault is None and need > free:
        fault = (f"checkpoints need {need / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free: "
                 "lower --keep, or put --run on a larger disk.")
    raise Rehearsed(fault or "")


def largest_micro_batch(backward, batch):
    """Memory is a + b * rows: measure it at one and at four rows, on the device as it is."""
    rows, before, peaks = len(batch["rows"]), backward.micro_batch, {}
    for size in (1, min(4, rows)):
        backward.micro_batch = size
        backward._free()
        torch.cuda.reset_peak_memory_stats()
        backward(batch)
        peaks[size] = torch.cuda.max_memory_allocated()
    backward.micro_batch = before
    low, high = min(peaks), max(peaks)
    slope = (peaks[high] - peaks[low]) / max(1, high - low)
    room = torch.cuda.get_device_properties(0).total_memory * 0.95 - peaks[low]
    return rows if slope <= 0 else max(1, min(rows, int(low + room / slope)))


@contextlib.contextmanager
def debugging(run):
    """A traceback of every thread at a crash, per rank, and a profiler's trace of some steps."""
    if not run.cfg.debug:
        yield lambda: None
        return
    rank, count = run.accelerator.process_index, 0
    profiler = torch.profiler.profile()

    def tick():
        nonlocal count
        count += 1
        if count == TRACED.start:
            profiler.start()
        if count == TRACED.stop:
            profiler.stop()
            profiler.export_chrome_trace(str(run.folder / f"trace_rank{rank}.json"))

    with open(run.folder / f"faults_rank{rank}.log", "w") as file:
        faulthandler.enable(file)
        print(f"debug: tracebacks in {file.name}, a trace after {TRACED.stop} steps beside it",
              file=sys.stderr)
        try:
            yield tick
        finally:
            faulthandler.disable()
