"""How float32 numbers are multiplied in matrix products and convolutions.

Evaluation is exact. Training on CUDA rounds the factors of the backward pass to ten bits (TF32),
which gradients bear, and in 2-D and 3-D (`rounded` of a body) those of the forward pass, where
products take most of a step; only the first and the last layer stay exact there. On a line products
take little, and errors fall so low that rounded blocks cost accuracy.

A roll-out may round the update, never the state, where validation shows that it does not matter:

    float32    exact
    tf32       products of the update rounded to ten bits
    bfloat16   the blocks of the body in bfloat16, the first and the last layer as with tf32
"""

import contextlib
import copy

import torch
import torch.nn.functional as F

TRAINING = "high"  # on CUDA; highest: exact
PRODUCTS = {"bfloat16": "high", "tf32": "high", "float32": "highest"}  # the fastest first


def linear(layer, x):
    """layer(x), right to 2^-20 where products are rounded: as products of parts of few bits."""
    if not x.is_cuda or not x.dtype == layer.weight.dtype == torch.float32:
        return layer(x)
    (x_high, x_low), (high, low) = _split(x), _split(layer.weight)
    return F.linear(x_high, high, layer.bias) + F.linear(x_low, high) + F.linear(x, low)


def _split(x):
    """x = high + low: ten bits, which get no gradient, and the rest."""
    high = (x.detach().view(torch.int32) & -(1 << 13)).view(torch.float32)
    return high, x - high


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
