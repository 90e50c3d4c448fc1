"""Seconds, memory and communication of a step on N GPUs, predicted from the ones of a dry run.

Each GPU has as many rows as one had there, and t seconds of compute. With P parameters in float32
and b bytes per second:

    DDP     t + 2 (N - 1) / N 4 P / b    all-reduce of the gradients, after backward
    FSDP2   t + 3 (N - 1) / N 4 P / b    weights gathered twice, gradients scattered; no overlap

Agreement rides in the all-reduce: N numbers more. FSDP2 shares weights, gradients, moments and
averages among the N.
"""

import itertools

import torch
import torch.distributed as dist

from ups.train.ranks import now

MACHINE, INSIDE, BETWEEN = 8, 300e9, 40e9  # GPUs of one; bytes/s in it and between several
LATENCY = 20e-6  # seconds, for each doubling of N
GPUS, PASSES = (1, 2, 8, 64, 512), {"DDP": 2, "FSDP2": 3}


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
    own = [getattr(t, "to_local", lambda t=t: t)() for t in shared]
    return sum(p.numel() for p in params), *(sum(t.nbytes for t in ts) for ts in (shared, own))


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
    lines = [f"{'GPUs':>6}  " + "".join(f"{name + ' s/step':>14}{'GiB':>8}{'of it sent':>12}"
                                        for name in PASSES)]
    for gpus in GPUS:
        cells = [f"{gpus:>6}  "]
        for name, passes in PASSES.items():
            sent = communication(gpus, parameters, passes, inside)
            held = memory - own + shared / (gpus if name == "FSDP2" else 1)
            cells.append(f"{compute + sent:>14.4f}{held / 2**30:>8.2f}"
                         f"{sent / (compute + sent):>12.1%}")
        lines.append("".join(cells))
    return "\n".join(lines)
