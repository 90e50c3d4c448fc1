"""`--dry_run`: look before an expensive run.

A rehearsal takes the last steps of the run (the longest unroll), with an evaluation and a
checkpoint at the end, in a folder of its own, and says what the run will need. What it leaves are
data, codec and cache. Exit codes as of a run, and one sentence that says what to change.
"""

import contextlib
import itertools
import json
import resource
import shutil
import sys
from pathlib import Path

import torch

from ups.config import UsageError
from ups.train.checkpoint import checkpoints, damage, gather_state, read_checkpoint, restore_state
from ups.train.ranks import PeerFailed, Stopped, now, on_main
from ups.train.step import is_out_of_memory

STEPS = 8  # of a rehearsal at least; the first ones compile and warm up
GIB = 2**30


def length(run):
    """Steps of a rehearsal: of each task a first one and a second, with graphs two warm-ups, a
    capture and a replay; and the last, which evaluates."""
    return max(STEPS, (4 if run.graphs else 2) * run.round + 1)


class Rehearsed(Exception):
    """The rehearsal is over; its message is the fault that it found, or empty."""


def mark(run):
    """Call before every step."""
    run.marks.append(now())


def step_seconds(marks, round):
    """The mean of a round of all tasks, each place in it at its quickest.

    `marks` are the seconds before each step and after the last, which evaluates and saves: it does
    not count.
    """
    steps = [b - a for a, b in itertools.pairwise(marks)]
    steps = steps[:-1] or steps
    places = [min(steps[i::round]) for i in range(min(round, len(steps)))]
    return sum(places) / len(places)


def report(run):
    """Try the checkpoint, print what the run needs on every rank's behalf, raise `Rehearsed`."""
    accelerator, marks = run.accelerator, [*run.marks, now()]
    peak = torch.tensor([peak_memory(accelerator)], device=accelerator.device)
    peaks = accelerator.gather(peak).tolist()
    fault = round_trip(run)
    raise Rehearsed(on_main(accelerator, _table, run, marks, peaks, fault))


def peak_memory(accelerator):
    """Bytes at most so far: allocated on the GPU, or resident on the CPU."""
    if accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def round_trip(run):
    """Load the checkpoint over wiped weights and compare every tensor; the fault, or an empty text.

    Every rank calls.
    """
    def newest():
        found = checkpoints(run.folder / "checkpoints")
        return (found[0], damage(found[0])) if found else (None, None)

    folder, fault = on_main(run.accelerator, newest)
    if folder is None or fault:
        return (f"the checkpoint cannot be written ({fault or 'see above'}): make room, or put "
                "--run on another disk.")
    tensors, state = read_checkpoint(folder)
    model, optimizer, ema = (run.parts[name] for name in ("model", "optimizer", "ema"))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    restore_state(run.accelerator, tensors, state["optimizer"], model, optimizer.optimizer, ema)
    again = gather_state(run.accelerator, model, optimizer.optimizer, ema)  # main process only
    wrong = [name for name, tensor in again.items() if not torch.equal(tensor, tensors[name])]
    return f"the checkpoint does not restore {wrong[0]}: this is a bug." if wrong else ""


def _table(run, marks, peaks, fault):
    """Print the needs (main process); the fault, that of the disk included."""
    cfg, device = run.cfg, run.accelerator.device.type
    found = checkpoints(run.folder / "checkpoints")
    size = sum(file.stat().st_size for file in found[0].iterdir()) if found else 0
    need, free = size * (cfg.keep + 1), shutil.disk_usage(run.folder).free
    seconds = step_seconds(marks, run.round)
    last = marks[-1] - marks[-2] - seconds  # evaluation and checkpoint
    total = seconds * cfg.steps + last * (cfg.steps // min(cfg.eval_every, cfg.save_every) + 1)
    memory = ", ".join(f"rank {rank} {peak / GIB:.2f} GiB" for rank, peak in enumerate(peaks))
    print(f"""
rehearsal of {run.stage}: {len(peaks)} process{"es" * (len(peaks) > 1)}, {device}
  seconds per step       {seconds:.4f} at the end of training
  evaluation, checkpoint {last:.2f} s each time
  total                  at most {total / 60:.1f} minutes for {cfg.steps} steps
  peak memory            {memory}
  micro-batch            {run.backward.micro_batch} rows fit, of {cfg.batch_size // len(peaks)} \
per process
  cache                  {cache_bytes(run) / 2**20:.1f} MiB in {cfg.cache}
  checkpoint             {size / 2**20:.1f} MiB, {cfg.keep} kept: {need / GIB:.2f} GiB needed, \
{free / GIB:.1f} GiB free
  round trip             {fault or "exact"}""", flush=True)
    if not fault and need > free:
        fault = (f"checkpoints need {need / GIB:.1f} GiB and {free / GIB:.1f} GiB are free: "
                 "lower --keep, or put --run on a larger disk.")
    return fault


def cache_bytes(run):
    """Size of the latents, below --cache, that were made with the codecs of this run."""
    size = 0
    for path in Path(run.cfg.cache).glob("*/manifest.json"):
        with contextlib.suppress(ValueError, KeyError):  # a damaged one is not ours to judge
            manifest = json.loads(path.read_text())
            if manifest["identity"]["codec"] in run.built_on.values():
                size += sum(shard["bytes"] for shard in manifest["shards"])
    return size


def clear(folder):
    """Forget what a rehearsal that was killed has left; its lock is ours now (main process)."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def end(run, error):
    """Remove the folder and exit, with a sentence; what is a bug keeps its traceback."""
    main = run.accelerator.is_main_process
    if main:
        shutil.rmtree(run.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder stays where it holds anything
            run.folder.parent.rmdir()
            Path(run.cfg.run).rmdir()
    text, told = str(error), main
    if is_out_of_memory(error):
        rows, told = getattr(getattr(run, "backward", None), "micro_batch", 0), True
        cure = f"use --micro_batch {rows // 2}" if rows > 1 else "a smaller model or batch will fit"
        text = f"rank {run.accelerator.process_index} is out of memory at {rows} rows: {cure}."
    elif not isinstance(error, Rehearsed | UsageError | Stopped | PeerFailed | FloatingPointError):
        return
    if told and not isinstance(error, PeerFailed):
        print(f"error: {text}" if text else "all is well.", file=sys.stderr)
    if isinstance(error, Rehearsed):
        run.accelerator.end_training()
    usage, stopped = isinstance(error, UsageError), isinstance(error, Stopped)
    sys.exit(2 if usage else 143 if stopped else int(bool(text)))
