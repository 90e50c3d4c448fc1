"""A stage's script as it is, `train_STAGE`, on CPU processes through Accelerate's FSDP2 code."""

import importlib
import sys

import fsdp_on_cpu

with fsdp_on_cpu.strategy("fsdp"):
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
