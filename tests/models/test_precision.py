"""Products are exact, but in the backward pass of a training step on CUDA."""

import contextlib
import types

import pytest
import torch

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


@pytest.mark.parametrize("device, expected", [("cuda", ["highest", "high"]),
                                              ("cpu", ["highest", "highest"])])
def test_only_gradients_are_rounded(device, expected):
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
    accelerator = types.SimpleNamespace(
        num_processes=1, device=torch.device(device), distributed_type=None,
        no_sync=lambda model: contextlib.nullcontext(), backward=lambda loss: loss.backward())
    cfg = types.SimpleNamespace(micro_batch=0)
    run = types.SimpleNamespace(accelerator=accelerator, cfg=cfg, graphs=False)
    step = Backward(run, model, lambda model, chunk: Seen.apply(model(chunk["x"]))[:, 0])
    step._chunk({"x": torch.ones(3, 2), "rows": torch.arange(3)}, rows=3)
    assert seen == expected
    assert (torch.get_float32_matmul_precision(), cudnn.allow_tf32) == before
