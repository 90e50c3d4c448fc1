"""How float32 numbers are multiplied in matrix products."""

import contextlib

import torch


@contextlib.contextmanager
def products(precision):
    """`high`: on CUDA's tensor cores, rounded to ten bits (TF32); `highest`: as they are."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
