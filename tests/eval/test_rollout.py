"""Metrics and roll-outs against formulas written out by hand."""

import math
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from factual import facts

from ups.eval.metrics import drift, nrmse
from ups.eval.report import summary, table
from ups.eval.rollout import by_trajectory, measure, rollout


def test_nrmse_is_the_mean_of_relative_errors_and_skips_zero_channels():
    y = torch.tensor([[[[3.0, 4.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0]]]])  # (1, 2, 2, 2)
    p = torch.tensor([[[[3.0, 5.0], [9.0, 9.0]], [[1.0, 1.0], [0.0, 1.0]]]])
    expected = torch.tensor([[1 / 5, (1 / 1 + 1 / 2) / 2]], dtype=torch.float64)
    assert torch.allclose(nrmse(p, y), expected, atol=1e-12)


def test_drift_is_the_change_of_conserved_means_and_zero_where_nothing_is_conserved():
    u0 = torch.tensor([[[3.0, 1.0], [5.0, 5.0]]])  # (1, 2, 2): means 2 and 5, rms sqrt(5) and 5
    p = torch.tensor([[[[3.0, 2.0], [0.0, 0.0]], [[0.0, 4.0], [1.0, 1.0]]]])  # (1, 2, 2, 2)
    assert torch.allclose(drift(p, u0, [0]), torch.tensor([[0.5 / 5**0.5, 0.0]]))
    assert torch.allclose(drift(p, u0, [0, 1])[0, 0], torch.tensor((0.5 / 5**0.5 + 1) / 2))
    assert drift(p, u0, []).tolist() == [[0.0, 0.0]]


def test_a_rollout_applies_the_model_again_and_again():
    z = rollout(lambda z, dt, cond, task, inputs: 0.5 * z, torch.ones(2, 3, 4), 4, None, None)
    assert z.shape == (2, 4, 3, 4)
    assert torch.equal(z[0, :, 0, 0], torch.tensor([0.5, 0.25, 0.125, 0.0625]))


@pytest.fixture
def task():
    """Eleven trajectories that halve in every step; decode(encode(u)) = 0.9 u."""
    class Fields:
        facts = facts()

        def split(self, name):
            return torch.arange(11)

        def read(self, chosen):
            start = torch.randn(11, 1, 1, 8, generator=torch.Generator().manual_seed(0))[chosen]
            return start * 0.5 ** torch.arange(6.0)[:, None, None]

    return types.SimpleNamespace(fields=Fields(), encode=lambda u: u.mT,
                                 decode=lambda z: 0.9 * z.mT, conserved=[],
                                 cond=lambda chosen: torch.zeros(len(chosen), 1),
                                 inputs=lambda chosen: None)


def test_measure_gives_the_errors_that_the_model_must_have(task):
    wrong = 0.6  # the true factor is 0.5
    tables = measure(Accelerator(cpu=True), lambda z, *given: wrong * z, task, 0, "test")
    for lead in range(1, 6):
        ratio = 0.9 * (wrong / 0.5) ** lead
        assert torch.allclose(tables["operator"][:, lead - 1].float(),
                              torch.full((11,), abs(ratio - 1)), atol=1e-5)
        assert math.isclose(tables["one_step"][3, lead - 1], abs(0.9 * wrong / 0.5 - 1),
                            abs_tol=1e-5)
        assert math.isclose(tables["persistence"][3, lead - 1], 2**lead - 1, rel_tol=1e-5)
        assert math.isclose(tables["codec"][3, lead - 1], 0.1, abs_tol=1e-5)


@pytest.mark.parametrize("kind, rows", [("FSDP", [[2, 2], [2, 2], [1, 1]]),
                                        ("MULTI_GPU", [[2, 2], [2, 2], [1, 1]]),
                                        ("FSDP odd", [[3, 3], [3, 3]]),
                                        ("MULTI_GPU odd", [[3, 3], [3, 2]])])
def test_ranks_compute_equally_many_rows_where_a_forward_is_a_collective(kind, rows):
    name, *odd = kind.split()
    size, count = (3, 11) if odd else (2, 9)
    asked, whole = [], []
    for rank in range(2):
        accelerator = types.SimpleNamespace(
            num_processes=2, process_index=rank, distributed_type=DistributedType[name],
            device="cpu", reduce=lambda table, reduction: table)
        calls = []

        def tables(chosen, calls=calls):
            calls.append(len(chosen))
            return {"double": 2.0 * chosen[:, None]}

        chosen = torch.arange(100, 100 + count)
        whole.append(by_trajectory(accelerator, tables, chosen, size, spread=False)["double"])
        asked.append(calls)
    assert list(map(list, zip(*asked, strict=True))) == rows
    assert torch.equal(sum(whole)[:, 0], 2.0 * chosen.double())


def test_the_table_shows_the_leads_that_there_are(task):
    tables = measure(Accelerator(cpu=True), lambda z, *given: 0.5 * z, task, 0, "test")
    result = summary(tables)
    assert result["leads"] == [1, 5] and result["trajectories"] == 11
    text = table("toy", result)
    assert "step 5" in text and "step 10" not in text
    assert "codec floor      1.00e-01   1.00e-01   1.00e-01" in text
