"""The cost model: its formulas, and what it reads from a run."""

from types import SimpleNamespace

import pytest
import torch

from ups.train import cost
from ups.train.ema import EMA

G = 10**9


def rows(text):
    lines = [line.replace("%", "").split() for line in text.splitlines()[1:]]
    return {int(line[0]): [float(cell) for cell in line[1:]] for line in lines}


def test_communication_is_what_crosses_the_slowest_link():
    assert cost.communication(1, G, 2, 100e9) == 0
    assert cost.communication(2, G, 2, 100e9) == pytest.approx(2 * (4 * 0.5 / 100 + 20e-6))
    assert cost.communication(8, G, 3, 100e9) == pytest.approx(3 * (4 * 7 / 8 / 100 + 60e-6))
    assert cost.communication(512, G, 2, 100e9) == pytest.approx(2 * (4 * 511 / 512 / 40 + 180e-6))
    assert cost.communication(512, G, 2, 1e9) == pytest.approx(8 * 511 / 512, rel=1e-3)


def test_a_table_goes_through_what_was_measured():
    gib = 2**30
    ddp = rows(cost.table(0.5, 30 * gib, G, 24 * gib, 24 * gib, 100e9, 2, "DDP"))
    sent = 0.04004
    assert ddp[2] == [0.5, 30.0, 8.0, pytest.approx(0.5 + sent / 2, abs=1e-4), 18.0, 11.5]
    assert ddp[1] == [pytest.approx(0.46, abs=1e-4), 30.0, 0.0] * 2
    assert ddp[512][1] == 30.0 and ddp[512][4] == pytest.approx(6.05, abs=0.01)
    fsdp = rows(cost.table(0.5 + sent / 2, 18 * gib, G, 24 * gib, 12 * gib, 100e9, 2, "FSDP2"))
    assert fsdp == ddp


def test_sizes_count_weights_gradients_averages_and_moments():
    model = torch.nn.Linear(9, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(9)).sum().backward()
    optimizer.step()
    run = SimpleNamespace(parts={"model": model, "optimizer": optimizer, "ema": EMA(model, 0.9)})
    assert cost.sizes(run) == (100, 2408, 2408)  # 6 x 400 and two counters
    assert cost.bandwidth(SimpleNamespace(num_processes=1), 100) == cost.INSIDE
