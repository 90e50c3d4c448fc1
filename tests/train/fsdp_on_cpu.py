"""Drive Accelerate's real FSDP2 code with CPU processes over gloo.

Without a GPU, Accelerate gives DDP whatever the YAML says. The decision is one field of its state:
set it, with the plugin that the launcher's YAML describes, before anything is prepared.
"""

from unittest import mock

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from ups.train import ranks


def strategy(name, precision="no"):
    """In this context a `Run` uses "ddp" or "fsdp"; a process alone ("one") stays alone."""
    AcceleratorState._reset_state()  # it remembers the precision of the first Accelerator
    real = ranks.MixedAccelerator

    def make(**options):
        accelerator = real(mixed_precision=precision, **options)
        if name != "one":
            assert accelerator.num_processes > 1
            sharded = name == "fsdp"
            kind = DistributedType.FSDP if sharded else DistributedType.MULTI_CPU
            accelerator.state.distributed_type = kind
            PartialState._shared_state["distributed_type"] = kind
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin() if sharded else None
        return accelerator

    return mock.patch.object(ranks, "MixedAccelerator", make)
