"""TF32 is what only a GPU does; here the factors of each product are rounded by hand."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ups.eval.rollout import rollout
from ups.models import precision
from ups.models.latent_operator import LatentOperator, OperatorConfig, TaskSpec
from ups.models.precision import exact_linear, in_parts, products
from ups.train.step import eager

BASIS = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
PLATE = TaskSpec("plate", (1, 4, 5), 8, False, patch=(2, 2),
                 points=tuple(map(tuple, BASIS.tolist())))


class Rounded(TorchDispatchMode):
    """Products of matrices with their factors rounded to ten bits."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            args = [*args[:-2], *map(nearest, args[-2:])]
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
        assert apart(ours, theirs) < 2e-3  # of factors cut to ten bits


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


def test_products_of_a_rollout_are_exact_whatever_the_process_has(monkeypatch):
    """torch rounds convolutions unless told otherwise, and some containers all products."""
    cudnn, seen = torch.backends.cudnn, []
    monkeypatch.setattr(cudnn, "allow_tf32", True)  # a Run has turned it off

    def model(z, *where):
        seen.append((torch.get_float32_matmul_precision(), cudnn.allow_tf32))
        return z

    evaluated = eager(lambda: model(torch.zeros(1)))
    for level in ("highest", "high"):
        torch.set_float32_matmul_precision(level)
        try:
            rollout(model, torch.zeros(1), 2, None, None)
            evaluated()
            assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == (level, True)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert seen == [("highest", False)] * 6


@pytest.mark.parametrize("switch", ["cuda.matmul", "cudnn.conv"])
def test_the_other_switch_of_torch_is_refused_in_a_sentence(switch):
    """In a process of its own, as nothing turns it back."""
    code = f"""
import torch
from ups.models.precision import products
torch.backends.{switch}.fp32_precision = "ieee" if "conv" in "{switch}" else "tf32"
with products("highest"):
    pass
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode and "UsageError: torch's `fp32_precision` was set" in ended.stderr


@pytest.mark.parametrize("level, autocast, rounds", [
    ("high", False, True), ("highest", False, False), ("high", True, False)])
def test_nothing_is_taken_apart_where_nothing_is_rounded_to_tf32(monkeypatch, level, autocast,
                                                                 rounds):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
    with products(level):
        assert precision.may_round(SimpleNamespace(is_cuda=True)) == rounds
        assert not precision.may_round(torch.ones(1))
