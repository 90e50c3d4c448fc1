"""The average of the weights against its formula, compiled or not."""

import pytest
import torch
from torch import nn

from ups.train.ema import EMA
from ups.train.step import CudaGraphed


@pytest.mark.parametrize("compiled", [False, True])
def test_the_average_follows_its_formula(compiled, monkeypatch, traced):
    monkeypatch.setattr(CudaGraphed, "running", compiled)
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    expected = [p.detach().clone() for p in model.parameters()]
    ema = EMA(model, 0.3)
    for k in range(6):
        with torch.no_grad():
            for p in model.parameters():
                p += torch.randn_like(p)
        ema.update(model)
        decay = min(0.3, (1 + k) / (10 + k))  # the second from k = 3 on
        expected = [decay * e + (1 - decay) * p.detach()
                    for e, p in zip(expected, model.parameters(), strict=True)]
    assert ema.updates == 6
    for mean, value in zip(ema.shadow, expected, strict=True):
        assert torch.allclose(mean, value, atol=1e-14)
