"""How float32 numbers are multiplied in matrix products and convolutions.

The forward pass and evaluation are exact. On CUDA the backward pass rounds factors to ten bits
(TF32): gradients bear that, and errors of a well trained step are smaller than such a rounding.

A roll-out may round the update, never the state, where validation shows that it does not matter:

    float32    exact
    tf32       products of the update rounded to ten bits
    bfloat16   the blocks of the body in bfloat16, the first and the last layer as tf32
"""

import contextlib
import copy

import torch

BACKWARD = "high"  # on CUDA; highest: exact
PRODUCTS = {"bfloat16": "high", "tf32": "high", "float32": "highest"}  # the fastest first


def lowered(model, precision):
    """The model for roll-outs in a precision; it must run inside `products(PRODUCTS[..])`."""
    if precision == "bfloat16":
        model = copy.deepcopy(model)
        model.body.lower(torch.bfloat16)
    return model


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
