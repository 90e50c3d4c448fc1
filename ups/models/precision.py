"""How float32 numbers are multiplied in matrix products and convolutions.

The forward pass and all inference are exact. On CUDA the backward pass rounds factors to ten bits
(TF32): gradients bear that, and errors of a well trained step are smaller than such a rounding.
"""

import contextlib

import torch

BACKWARD = "high"  # on CUDA; highest: exact


@contextlib.contextmanager
def products(precision):
    """`high`: on tensor cores, rounded to TF32; `highest`: exact. Convolutions likewise."""
    if torch.compiler.is_compiling():  # there the caller's choice holds
        yield
        return
    cudnn = torch.backends.cudnn
    before, rounded = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        cudnn.allow_tf32 = rounded
