"""What processes agree on: an outcome, a value, a lock, the flags of a step, one Accelerator.

A rank that raises while the others wait in a collective leaves them hanging. Here every rank
catches locally, leaves the `except` block, and tells the others in a collective that all reach.
The scripts, `latents.py` and the cache import this module; it imports no data and no model.
"""

import ctypes
import os
import re
import signal
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)

from ups.config import RunError, UsageError
from ups.files import lock
from ups.train.deaths import Deaths, place

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class PeerFailed(RunError):
    """Another rank failed; its own message says why."""

    told = True


class Stopped(RunError):
    """A signal asked the run to stop."""


def everyone(accelerator, value):
    """The value of every rank, in their order."""
    values = [value] * accelerator.num_processes
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def together(accelerator, work, *args):
    """Return `work(*args)`; where it fails on one rank, every rank raises."""
    result = error = fault = None
    try:
        result = work(*args)
    except Exception as caught:
        error, fault = caught, (UsageError if isinstance(caught, UsageError) else PeerFailed,
                                str(caught))
    faults = everyone(accelerator, fault)
    if error is not None:
        raise error  # where it happened: with its traceback
    for kind, text in filter(None, faults):
        raise kind(text)
    return result


def on_main(accelerator, work, *args):
    """Call `work` on the main process; every rank gets its result, or its failure."""
    def mine():
        return work(*args) if accelerator.is_main_process else None

    return everyone(accelerator, together(accelerator, mine))[0]


def take_lock(accelerator, path, flag):
    """Wait until the main process holds a lock; the collectives are short, so none times out."""
    while True:
        held = together(accelerator, lambda: lock(path, flag) if accelerator.is_main_process
                        else None)
        if any(everyone(accelerator, held is not None)):
            return held
        time.sleep(0.5)


class Agreement:
    """Flags on which all ranks agree in one small all-reduce on the CPU, once in every step."""

    def __init__(self, accelerator, timeout):
        self.alone = accelerator.num_processes == 1
        self.patience = 0.8 * timeout  # the main process names a silent rank
        self.deaths = Deaths(everyone(accelerator, place()))
        if not self.alone:  # gloo: no device synchronisation; a silent main process is named last
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def __call__(self, *flags):
        """The largest of each flag over all ranks; a rank that does not answer is named."""
        if self.alone:
            return flags
        began = time.monotonic()
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=self.patience),
                                   wait_all_ranks=True)
        except RuntimeError as error:  # of a process that stands still, or has died
            fault = self._fault(str(error).split("\n")[0], time.monotonic() - began)
            raise RunError(f"{fault}; run the same command again.") from error
        tensor = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def _fault(self, text, seconds):
        """Whom the barrier's text means: the main process reads "Ranks 1, 2 failed"."""
        named = re.search(r"Ranks? ([\d, ]*\d) failed", text)
        ranks = f"rank {named[1] if named else 0}"
        if seconds >= self.patience:
            return f"{ranks} does not answer after {seconds:.0f} s"
        return self.deaths.story()[1] or f"{ranks} closed its connection: its own message says why"


class MixedAccelerator(Accelerator):
    """Give FSDP2 the autocast that Accelerate gives DDP alone.

    FSDP2 can cast a module's inputs instead, but then z0 in  z0 + update  is rounded to bf16 too.
    """

    def prepare(self, *args, **options):
        if self.is_fsdp2 and self.mixed_precision == "bf16":
            for model in args:
                if isinstance(model, torch.nn.Module):
                    cast = torch.autocast(self.device.type, torch.bfloat16)
                    model.forward = cast(model.forward)
        return super().prepare(*args, **options)


def usable_gpu():
    """Whether there is a GPU with float64, which sums and averages need."""
    if not torch.accelerator.is_available():
        return False
    kind = torch.accelerator.current_accelerator().type
    if kind == "mps":
        print("this Mac's GPU has no float64; using the CPU.", file=sys.stderr)
    return kind != "mps"


def make_accelerator():
    """An Accelerator with the policy of all stages; refuses what cannot train well.

    Batches are global, reductions float32, and nothing communicates behind the script's back.
    """
    launched = os.environ.keys() & {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}
    if launched and sys.platform == "linux":  # do not outlive the launcher
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # It takes a second to load, which --help need not wait for; but where torch loads it itself,
    # after a process group has begun, the threads of that group outlive the command.
    from torch.distributed.fsdp import MixedPrecisionPolicy

    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch's new name
    torch.backends.cudnn.deterministic = True  # else gradients of convolutions differ by chance
    torch.backends.cudnn.allow_tf32 = False  # exact, but for the steps that choose otherwise
    accelerator = MixedAccelerator(
        cpu=not usable_gpu(),
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(minutes=30)),
        ],
    )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UsageError(f"mixed_precision {accelerator.mixed_precision} is not supported: small "
                         'gradients vanish in it; use "bf16" or "no" in the accelerate config.')
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded and accelerator.mixed_precision == "bf16":
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32,
            cast_forward_inputs=False)
    return accelerator


def now():
    """Seconds, when the device has done all that it was asked to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
