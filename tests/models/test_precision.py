"""TF32 is what only a GPU does; here the factors of each product are rounded by hand."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ups.models import precision
from ups.models.latent_operator import LatentOperator, OperatorConfig, TaskSpec
from ups.models.points import Conv2d
from ups.models.precision import exact_linear, in_parts, products

BASIS = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
PLATE = TaskSpec("plate", (1, 4, 5), 8, False, patch=(2, 2),
                 points=tuple(map(tuple, BASIS.tolist())))


class Rounded(TorchDispatchMode):
    """Products of matrices with their factors rounded to ten bits; `seen`: whether convolutions
    would have been."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            args = [*args[:-2], *map(nearest, args[-2:])]
        if name == "convolution":
            self.seen.append(torch.backends.cudnn.allow_tf32)
        return function(*args, **kwargs or {})


def nearest(x):
    bits = x.contiguous().view(torch.int32)
    return (bits + (1 << 12) & -(1 << 13)).view(torch.float32)


def apart(x, y):
    return ((x - y).norm() / y.norm()).item()


def test_an_exact_product_survives_rounded_factors():
    torch.manual_seed(0)
    x, weight = torch.randn(200, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    with Rounded():
        plain, exact = F.linear(x, weight), F.linear(*in_parts(x, weight))
    truth = x.double() @ weight.double().mT
    assert 1e-4 < apart(plain, truth) < 1e-3 and apart(exact, truth) < 1e-6
    wanted = torch.autograd.grad(plain.square().sum(), (x, weight))
    for ours, theirs in zip(torch.autograd.grad(exact.square().sum(), (x, weight)), wanted,
                            strict=True):
        assert apart(ours, theirs) < 2e-3  # the gradients are those of rounded factors


@pytest.mark.parametrize("dtype, parts", [(torch.float32, 3), (torch.bfloat16, 1),
                                          (torch.float64, 1)])
def test_only_float32_is_taken_apart(monkeypatch, dtype, parts):
    widths = []
    monkeypatch.setattr(precision, "may_round", lambda x: True)
    monkeypatch.setattr(precision.F, "linear", lambda x, *more: widths.append(x.shape[-1]))
    exact_linear(torch.ones(4, 6, dtype=dtype), torch.ones(2, 6, dtype=dtype))
    assert widths == [6 * parts]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("fine", [0, 4])
def test_a_field_goes_through_an_operator_unrounded(monkeypatch, exact, fine):
    """What is left without blocks and gates are the layers that a field itself goes through."""
    torch.manual_seed(0)
    monkeypatch.setattr(precision, "may_round", lambda x: exact)
    model = LatentOperator(OperatorConfig(dim=16, depth=1), [PLATE], fine)
    for own in model.points:
        for p in [p for part in ("down", "up") for p in own.hidden[part].parameters()]:
            torch.nn.init.zeros_(p)
    last = model.points[0].out if fine else model.body.out[0]
    for p in model.body.out.parameters():
        torch.nn.init.zeros_(p)
    torch.nn.init.normal_(last.weight)
    z, dt, cond = torch.randn(3, 20, 8), torch.ones(3), torch.zeros(3, 0)
    truth = model(z, dt, cond) - z
    with Rounded():
        error = apart(model(z, dt, cond) - z, truth)
    assert error < 2e-6 if exact else 1e-4 < error < 1e-2


def test_convolutions_are_rounded_only_where_products_are():
    """torch rounds them unless told otherwise, in a roll-out too."""
    cudnn, conv = torch.backends.cudnn, Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    assert cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
    with Rounded() as mode:
        conv(torch.ones(1, 1, 4, 4))
        with products("high"):
            conv(torch.ones(1, 1, 4, 4))
        F.conv2d(torch.ones(1, 1, 4, 4), conv.weight)
    assert mode.seen == [False, True, True]
    assert cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
