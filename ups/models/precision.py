"""How float32 numbers are multiplied in matrix products."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from ups.config import UsageError

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
    try:
        before, rounded = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:
        raise UsageError("torch's `fp32_precision` was set somewhere; torch then refuses "
                         "`set_float32_matmul_precision`, by which this package sets the precision "
                         "of products, as needed. Leave it out.") from None
    torch.set_float32_matmul_precision(precision)
    cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        cudnn.allow_tf32 = rounded


def exact_linear(x, weight, bias=None):
    """`F.linear` that TF32 does not round, for narrow layers that a field goes through as it is:
    ten bits of it err as much as a well trained step.

    The gradients are those of factors cut to ten bits.
    """
    if may_round(x) and x.dtype == weight.dtype == torch.float32:
        x, weight = in_parts(x, weight)
    return F.linear(x, weight, bias)


class ExactLinear(nn.Linear):
    """A layer of `exact_linear`"""

    def forward(self, x):
        return exact_linear(x, self.weight, self.bias)


def may_round(x):
    """Whether TF32 may come to a product of x"""
    return (x.is_cuda and torch.backends.cuda.matmul.allow_tf32
            and not torch.is_autocast_enabled("cuda"))


def in_parts(x, weight):
    """Factors whose product is x w^T but for the last bits of single precision:

        (x', dx, x') (w', w', dw)^T = x' w'^T + dx w'^T + x' dw^T       x = x' + dx, w = w' + dw

    x' and w' have ten bits, so that TF32 leaves them as they are, and dx and dw are small.
    """
    a, c = _cut(x), _cut(weight)
    return torch.cat([a, x - a, a], -1), torch.cat([c, c, weight - c], -1)


def _cut(x):
    """Without the last 13 bits of 23, and without a gradient"""
    return (x.detach().contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)
