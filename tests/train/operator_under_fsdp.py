"""train_operator.py as it is, on CPU processes through Accelerate's real FSDP2 code."""

import fsdp_on_cpu

import train_operator

with fsdp_on_cpu.strategy("fsdp"):
    train_operator.main()
