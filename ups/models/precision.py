"""How float32 numbers are multiplied in matrix products."""

import contextlib

import torch

TF32 = {  # of a training step on CUDA: how forward and backward multiply
    "all": ("high", "high"),
    "backward": ("highest", "high"),  # where errors are so small that rounding would hide them
    "none": ("highest", "highest"),
}


@contextlib.contextmanager
def products(precision):
    """`high`: on CUDA's tensor cores, rounded to ten bits (TF32); `highest`: as they are. Both
    for convolutions too, which torch rounds unless told otherwise.

    Inside a compiled model nothing is changed: there the caller's choice holds.
    """
    if torch.compiler.is_compiling():
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
