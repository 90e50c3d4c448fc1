"""One policy for all stages: the Accelerator, and decisions that every rank takes alike.

Batches are global, reductions are float32, nothing communicates behind the script's back, and
where one rank does something for all (`on_main`), all of them get its result or its failure.
"""

import ctypes
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from ups.config import UsageError

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


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


class PeerFailed(RuntimeError):
    """Another rank failed; its own message says why."""


class Stopped(Exception):
    """A signal asked the run to stop."""


def on_main(accelerator, function, *args):
    """Call `function` on the main process; every rank gets its result, or its failure."""
    result = error = None
    if accelerator.is_main_process:
        try:
            result = function(*args)
        except Exception as caught:
            error = caught
    box = [result, error is not None, isinstance(error, UsageError), str(error)]
    result, failed, usage, text = broadcast_object_list(box)
    if error is not None:
        raise error
    if failed:
        raise (UsageError if usage else PeerFailed)(text)
    return result


class Agreement:
    """Flags on which all ranks agree in one small all-reduce on the CPU, once in every step."""

    def __init__(self, accelerator, timeout):
        self.alone = accelerator.num_processes == 1
        self.patience = timedelta(seconds=0.8 * timeout)  # the main process names a silent rank
        if not self.alone:  # gloo: no device synchronisation; a silent main process is named last
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def __call__(self, *flags):
        """The largest of each flag over all ranks; a rank that does not answer is named."""
        if self.alone:
            return flags
        try:
            dist.monitored_barrier(self.group, self.patience, wait_all_ranks=True)
        except RuntimeError as error:  # of a process that stands still, or has died
            why = " ".join(str(error).split("\n")[0].split())
            raise TimeoutError(f"{why}; run the same command again.") from error
        tensor = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()


def make_accelerator(debug=False):
    """An Accelerator with the policy of all stages; refuses what cannot train well."""
    if debug:
        os.environ.update(TORCH_DISTRIBUTED_DEBUG="INFO", NCCL_DEBUG="INFO")
        dist.set_debug_level_from_env()  # torch read it at import; DETAIL crashes DDP over gloo
    if os.environ.keys() & {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}:
        # started by accelerate or torchrun: do not outlive it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    torch.backends.cudnn.deterministic = True  # else gradients of convolutions differ by chance
    torch.backends.cudnn.allow_tf32 = False  # exact, but for the steps that choose otherwise
    accelerator = MixedAccelerator(
        cpu=not torch.accelerator.is_available(),
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
