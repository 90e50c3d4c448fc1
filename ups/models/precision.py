"""How float32 numbers are multiplied in matrix products."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

TF32 = {  # of a training step on CUDA: how forward and backward multiply
    "all": ("high", "high"),
    "backward": ("highest", "high"),  # where errors are so small that rounding would hide them
    "none": ("highest", "highest"),
}


@contextlib.contextmanager
def products(precision=None):
    """`high`: on CUDA's tensor cores, rounded to ten bits (TF32); `highest`: as they are. Both
    for convolutions too, which torch rounds unless told otherwise. None: as matrices are.

    Inside a compiled model nothing is changed: there the caller's choice holds.
    """
    if torch.compiler.is_compiling():
        yield
        return
    cudnn = torch.backends.cudnn
    before, rounded = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    precision = precision or before
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        cudnn.allow_tf32 = rounded


def exact_linear(x, weight, bias=None):
    """`F.linear` of which TF32 rounds nothing, for narrow layers that a field goes through as it
    is: ten bits of it err as much as a well trained step.
    """
    if may_round(x) and x.dtype == weight.dtype == torch.float32:
        x, weight = in_parts(x, weight)
    return F.linear(x, weight, bias)


class ExactLinear(nn.Linear):
    def forward(self, x):
        return exact_linear(x, self.weight, self.bias)


def may_round(x):
    return x.is_cuda and not torch.is_autocast_enabled("cuda")


def in_parts(x, weight):
    """(x', dx, x') and (w', w', dw): the product of these is x w^T but for dx dw^T, and what x' and
    w' have in their ten bits is x and w but for dx and dw."""
    a, c = _cut(x), _cut(weight)
    return torch.cat([a, x - a, a], -1), torch.cat([c, c, weight - c], -1)


def _cut(x):
    """Without the last 13 bits of 23, and without a gradient"""
    return (x.detach().contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)
