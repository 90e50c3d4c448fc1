"""Look before an expensive run: `--dry_run` says what it needs, `--minutes` how long it may be.

Both take a few steps, with a validation and a checkpoint after the last one. A dry run does so in a
folder of its own, prints what it saw and leaves data, codec and cache. Before a run of so many
minutes the steps are undone, and the schedule gets as many as there is time for.

A dry run also predicts a step on N GPUs, each with as many rows as one had here and t seconds of
compute. With P parameters in float32 and b bytes per second:

    DDP     t + 2 (N - 1) / N 4 P / b    all-reduce of the gradients, after backward
    FSDP2   t + 3 (N - 1) / N 4 P / b    weights gathered twice, gradients scattered; no overlap

FSDP2 shares weights, gradients, moments and averages among the N.
"""

import contextlib
import itertools
import resource
import shutil
import sys

import torch
import torch.distributed as dist

from ups.config import RunError, UsageError
from ups.memory import GIB
from ups.train import folder
from ups.train.checkpoint import checkpoints
from ups.train.ema import local, reshard
from ups.train.ranks import everyone, now, on_main
from ups.train.step import is_out_of_memory
from ups.train.tracking import Metrics

TEST = 10  # times as long as a validation, about
MACHINE, INSIDE, BETWEEN = 8, 300e9, 40e9  # GPUs of one; bytes/s in it and between several
LATENCY = 20e-6  # seconds, for each doubling of N
GPUS, PASSES = (1, 2, 8, 64, 512), {"DDP": 2, "FSDP2": 3}


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
    times, run.trial = [], True
    for batch in steps:
        times.append(now())
        yield batch
    times.append(now())
    run.trial = False
    seconds = step_seconds(times, len(run.sampler.sizes))
    return seconds, times[-1] - times[-2] - seconds


@contextlib.contextmanager
def undone(run):
    """What is done in here to weights, averages and moments is undone, in the same memory."""
    model, ema, optimizer = (run.parts[name] for name in ("model", "ema", "optimizer"))
    weights, kept = local(model.parameters()), (run.folder, run.metrics)
    begin, run.folder = [p.clone() for p in weights], run.folder / "trial"
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
        run.folder, run.metrics = kept
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
    needs = sizes(run)
    costs = table(seconds, max(peaks), *needs, bandwidth(run.accelerator, needs[0]), len(peaks),
                  "FSDP2" if run.backward.sharded else "DDP")
    raise DryRunDone(on_main(run.accelerator, _print, run, seconds, last, peaks, costs))


def _print(run, seconds, last, peaks, costs):
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

predicted for N GPUs with {share} rows each (ups/train/dry_run.py):
{costs}""", flush=True)
    return "" if need <= free else (f"checkpoints need {need:.1f} GiB and {free:.1f} GiB are free: "
                                    "lower --keep, or put --run on a larger disk.")


def communication(gpus, parameters, passes, inside):
    """Seconds in which (N - 1) / N of all parameters cross the slowest link so many times."""
    rate = inside if gpus <= MACHINE else min(BETWEEN, inside)
    return passes * (4 * parameters * (gpus - 1) / gpus / rate
                     + LATENCY * (gpus - 1).bit_length())


def sizes(run):
    """Parameters; the bytes of all that FSDP2 shares, and those of it on this rank."""
    model, optimizer, ema = (run.parts[name] for name in ("model", "optimizer", "ema"))
    params = list(model.parameters())
    moments = itertools.chain(*(state.values() for state in optimizer.state.values()))
    shared = [*params, *params, *ema.shadow, *ema.best, *moments]  # once more for the gradients
    count, own = sum(p.numel() for p in params), local(shared)
    return count, sum(t.nbytes for t in shared), sum(t.nbytes for t in own)


def bandwidth(accelerator, parameters):
    """Bytes per second of an all-reduce, timed where there are several processes."""
    world, count = accelerator.num_processes, min(parameters, 2**26)
    if world == 1:
        return INSIDE
    buffer, times = torch.zeros(count, device=accelerator.device), []
    for _ in range(5):
        times.append(now())
        dist.all_reduce(buffer)
    quickest = min(b - a for a, b in itertools.pairwise([*times, now()]))
    return 2 * (world - 1) / world * buffer.nbytes / quickest


def table(seconds, memory, parameters, shared, own, inside, world, strategy):
    """Lines for N GPUs, from `seconds` and bytes of `memory` on `world` of them."""
    compute = seconds - communication(world, parameters, PASSES[strategy], inside)
    lines = [f"{'GPUs':>6}  " + "".join(f"{name + ' s/step':>14}{'GiB':>8}{'sending':>12}"
                                        for name in PASSES)]
    for gpus in GPUS:
        cells = [f"{gpus:>6}  "]
        for name, passes in PASSES.items():
            sent = communication(gpus, parameters, passes, inside)
            held = memory - own + shared / (gpus if name == "FSDP2" else 1)
            cells.append(f"{compute + sent:>14.4f}{held / GIB:>8.2f}"
                         f"{sent / (compute + sent):>12.1%}")
        lines.append("".join(cells))
    return "\n".join(lines)


def end(run, error):
    """Remove the folder, and say what was found: `command` prints an error's sentence."""
    if run.accelerator.is_main_process:
        folder.remove(run.folder)
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
