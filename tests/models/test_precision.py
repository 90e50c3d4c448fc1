"""Products are exact, but in training on CUDA; there the first and last layers' are."""

import contextlib
import types

import pytest
import torch

from ups.models.precision import linear
from ups.train.step import Backward, exact_inference


def test_products_of_an_evaluation_are_exact_whatever_the_process_has(monkeypatch):
    """torch rounds convolutions unless told otherwise, and some containers all products."""
    cudnn, seen = torch.backends.cudnn, []
    monkeypatch.setattr(cudnn, "allow_tf32", True)  # a Run has turned it off

    def model(z, *where):
        seen.append((torch.get_float32_matmul_precision(), cudnn.allow_tf32))
        return z

    evaluated = exact_inference(lambda: model(torch.zeros(1)))
    for level in ("highest", "high"):
        torch.set_float32_matmul_precision(level)
        try:
            evaluated()
            assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == (level, True)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert seen == [("highest", False)] * 2


@pytest.mark.parametrize("device, body, expected", [("cuda", True, ["high", "high"]),
                                                    ("cuda", False, ["highest", "high"]),
                                                    ("cpu", True, ["highest", "highest"])])
def test_only_training_on_a_card_is_rounded(device, body, expected):
    seen, cudnn = [], torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.get_float32_matmul_precision())
            assert cudnn.allow_tf32 == (seen[-1] == "high")  # of convolutions
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.get_float32_matmul_precision())
            assert cudnn.allow_tf32 == (seen[-1] == "high")
            return grad

    model = torch.nn.Linear(2, 1)
    model.rounded = body
    accelerator = types.SimpleNamespace(
        num_processes=1, device=torch.device(device), distributed_type=None,
        no_sync=lambda model: contextlib.nullcontext(), backward=lambda loss: loss.backward())
    cfg = types.SimpleNamespace(micro_batch=0)
    run = types.SimpleNamespace(accelerator=accelerator, cfg=cfg, graphs=False)
    step = Backward(run, model, lambda model, chunk: Seen.apply(model(chunk["x"]))[:, 0])
    step._chunk({"x": torch.ones(3, 2), "rows": torch.arange(3)}, rows=3)
    assert seen == expected
    assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == before


def test_a_linear_layer_is_exact_where_factors_are_rounded_to_ten_bits(monkeypatch):
    """F.linear here rounds its factors as the tensor cores do, and adds them up in double."""
    def tf32(x):
        bits = x.detach().view(torch.int32)
        bits = (bits + (1 << 12) & -(1 << 13)).view(torch.float32)
        return (x + (bits - x.detach())).double()  # the gradient of x

    def rounded(x, weight, bias=None):
        y = tf32(x) @ tf32(weight).T
        return (y if bias is None else y + bias).float()

    generator = torch.Generator().manual_seed(0)
    layer, x = torch.nn.Linear(24, 32), torch.randn(500, 24, generator=generator)
    x.requires_grad_()
    wanted = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    gradients = torch.autograd.grad(wanted.square().sum(), [x, layer.weight, layer.bias])
    monkeypatch.setattr(torch.nn.functional, "linear", rounded)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert 1e-4 < ((layer(x) - wanted).norm() / wanted.norm()) < 1e-3
    assert (linear(layer, x) - wanted).norm() / wanted.norm() < 3e-7
    for found, gradient in zip(torch.autograd.grad(linear(layer, x).square().sum(),
                                                   [x, layer.weight, layer.bias]),
                               gradients, strict=True):
        assert (found - gradient).norm() / gradient.norm() < 1e-3
