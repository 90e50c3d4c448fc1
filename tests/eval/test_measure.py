"""Forecasts, tables and summaries on a task whose answers are known in closed form."""

import math
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from decaying import DT, NU, STEPS, decaying, noisy, operator

from ups.config import UsageError
from ups.data.find import open_fields
from ups.data.make import make
from ups.eval import choices, finish
from ups.eval.data import begin, in_words
from ups.eval.forecasts import make_forecasts
from ups.eval.measure import by_trajectory, measure, spectrum_leads, summarise


@pytest.fixture(scope="module", params=[(16,), (8, 6)], ids=["1d", "2d"])
def measured(request):
    task = decaying(grid=request.param)
    forecasts = make_forecasts(task, 0, operator) | {"ensemble": noisy(8)}
    tables = measure(Accelerator(cpu=True), task, forecasts, task.fields.split("test"), members=8)
    assert tables.keys() == {"truth", *forecasts}
    return task, tables


def expected(rate):
    """nRMSE (2, T) of p = exp(rate nu t) y, for both nu."""
    t = DT * torch.arange(1, STEPS + 1)
    return (torch.exp(rate * NU * t) - 1).abs()


def rows(tables, name, metric="nrmse"):
    """The table (n, T) of the first channel, even and odd trajectories apart."""
    table = tables[name][metric][..., 0]
    assert torch.allclose(table[0::2], table[:1].expand_as(table[0::2]), atol=1e-5)
    return torch.stack([table[0], table[1]])


def test_forecasts_have_the_errors_that_they_must_have(measured):
    _, tables = measured
    for name, rate in (("operator", -0.1), ("shifted", -0.1), ("persistence", 1.0),
                       ("codec", 0.0)):
        assert torch.allclose(rows(tables, name), expected(rate), atol=1e-5), name
    one = (torch.exp(-0.1 * NU * DT) - 1).abs().expand(2, STEPS)
    assert torch.allclose(rows(tables, "one_step"), one, atol=1e-5)
    t = DT * torch.arange(1, STEPS + 1)
    swapped = (torch.exp((NU - 1.1 * NU.flip(0)) * t) - 1).abs()
    assert torch.allclose(rows(tables, "shuffled"), swapped, atol=1e-5)
    assert (rows(tables, "shuffled") > rows(tables, "operator")).all()


def test_the_training_mean_is_that_of_the_training_split(measured):
    task, tables = measured
    mean = task.fields.read(task.fields.split("train")).mean(0)
    y = task.fields.read([3])[0]
    error = (mean - y)[1:].flatten(2).norm(dim=2) / y[1:].flatten(2).norm(dim=2)
    assert torch.allclose(tables["mean"]["nrmse"][3], error.double(), atol=1e-5)


def test_an_ensemble_is_judged_by_mean_members_and_spread(measured):
    task, tables = measured
    own = tables["ensemble"]
    variance, square_error = own["spread_skill"].mean((0, 1, 2))
    assert (8 / 9 * variance).sqrt().item() == pytest.approx(0.05, rel=0.05)
    assert square_error.sqrt().item() == pytest.approx(0.05 / math.sqrt(8), rel=0.3)
    assert own["sample_nrmse"].mean() > own["nrmse"].mean() > 0
    assert own["rank"].shape == (10, STEPS, 9)
    energy = tables["truth"]["spectrum"]
    u = task.fields.read(task.fields.split("test"))[:, spectrum_leads(STEPS + 1)]
    assert torch.allclose(energy.sum(2), u.double().flatten(3).square().mean(3).sum(2) / 2)


def test_summaries_are_means_and_ratios_of_means(measured):
    task, tables = measured
    told = summarise(tables["ensemble"], tables["operator"], DT)
    assert told["members"] == 8 and told["milliseconds"] > 0
    scores, own, base = told["scores"], tables["ensemble"], tables["operator"]
    assert scores["nrmse"]["all"] == pytest.approx(own["nrmse"].mean().item())
    assert scores["nrmse"]["by_lead"] == pytest.approx(own["nrmse"].mean((0, 2)).tolist())
    assert scores["crps_ratio"]["all"] == pytest.approx(
        (own["crps"].mean() / base["crps"].mean()).item())
    assert scores["coverage_90"]["all"] > scores["coverage_50"]["all"] > 0.6  # no noise
    variance, square_error = own["spread_skill"].mean((0, 1, 2))
    assert scores["spread_skill"]["all"] == pytest.approx((variance / square_error).sqrt().item())
    assert scores["max_error"]["all"] == own["max_error"].max().item()
    assert scores["correlation_time"]["all"] == pytest.approx(DT * STEPS)
    size = task.fields.read(task.fields.split("test"))[:, 1:].double().flatten(3)
    whole = (own["rmse"].square().sum(1) / size.square().mean(3).sum(1)).sqrt().mean().item()
    assert scores["relative_l2"]["all"] == pytest.approx(whole, rel=1e-5)
    assert math.isnan(scores.pop("frmse_high")["all"])  # the grid has no such wavenumbers
    for score in scores.values():
        if "interval" in score:
            assert score["interval"][0] <= score["all"] <= score["interval"][1]
        for value, low, high in zip(score.get("by_lead", ()), score.get("low", ()),
                                    score.get("high", ()), strict=False):
            assert low <= value <= high


def test_a_channel_that_is_zero_is_left_out(measured):
    task, tables = measured
    table = {"nrmse": tables["operator"]["nrmse"].clone()}
    table["nrmse"][2, :, 1] = math.nan
    score = summarise(table, table, DT)["scores"]["nrmse"]
    assert score["all"] == pytest.approx(table["nrmse"].nanmean(2).mean().item())


def test_what_is_asked_for_alone_is_the_same(measured):
    task, tables = measured
    some = measure(Accelerator(cpu=True), task, {"ensemble": noisy(8)},
                   task.fields.split("test"), only=("crps", "nrmse"))
    assert some.keys() == {"ensemble"} and some["ensemble"].keys() == {"crps", "nrmse"}
    for metric in ("crps", "nrmse"):
        assert torch.equal(some["ensemble"][metric], tables["ensemble"][metric])


@pytest.mark.parametrize("frames", [1, STEPS + 1])
def test_given_channels_reach_every_step_of_every_forecast(frames):
    """du/dt = a(x, t): an operator that is told a makes no error, shifted or not."""
    task, grid = decaying(grid=(8, 6), samples=2), (8, 6)
    random = torch.Generator().manual_seed(0)
    a = torch.randn(4, frames, 2, *grid, generator=random)
    u0 = torch.randn(4, 1, 2, *grid, generator=random)
    change = DT * a[:, :STEPS].expand(-1, STEPS, -1, -1, -1).cumsum(1)
    task.fields.read = lambda chosen: torch.cat([u0, u0 + change], 1)[torch.as_tensor(chosen) % 100]
    task.inputs = lambda chosen: task.encode(a[chosen])
    task.codec = types.SimpleNamespace(decode_inputs=task.decode)
    task.encode_inputs = task.encode

    def told(z, dt, cond, index, inputs):
        return z + dt.view(-1, 1, 1) * inputs

    tables = measure(Accelerator(cpu=True), task, make_forecasts(task, 0, told), torch.arange(4))
    for name in ("operator", "one_step", "shifted"):
        assert tables[name]["nrmse"].max() < 1e-5 < tables["persistence"]["nrmse"].min(), name


def test_the_protocol_begins_at_the_tenth_frame(tmp_path):
    make("burgers1d", out=tmp_path, samples=20, grid=16, frames=23, t_end=0.5)
    fields = open_fields("burgers1d", tmp_path, stride_t=2)  # frames 0, 2, .., 22
    given = begin(fields, "pdebench")
    assert list(given.frames) == [18, 20, 22] and begin(fields, "initial") is fields
    assert torch.equal(given.read([0]), fields.read([0])[:, 9:])
    assert "scored on the 2 steps of 0.0454545 after them" in in_words(given.facts, "pdebench")
    with pytest.raises(UsageError, match="has 6 frames at --stride_t 4; .*pdebench gives 10 of"):
        begin(open_fields("burgers1d", tmp_path, stride_t=4), "pdebench")


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
        whole.append(by_trajectory(accelerator, tables, chosen, size)["double"])
        asked.append(calls)
    assert list(map(list, zip(*asked, strict=True))) == rows
    assert torch.equal(sum(whole)[:, 0], 2.0 * chosen.double())


def test_validation_and_test_of_a_stage_are_means_of_the_same_tables(tmp_path, capsys, measured):
    """Two tasks: nRMSE of the first twice, so its geometric mean is that of one."""
    task, tables = measured
    written = {}
    run = types.SimpleNamespace(
        accelerator=Accelerator(cpu=True), cfg=types.SimpleNamespace(val_trajectories=4),
        folder=tmp_path, write=lambda name, values: written.update({name: values}))
    scores = finish.validate(run, operator, [task, decaying("other", task.facts.grid)])
    assert scores["val/nrmse_rollout"] == pytest.approx(expected(-0.1).mean().item(), rel=1e-3)
    assert scores["val/other/nrmse_1"] == pytest.approx(scores["val/nrmse_1"], rel=1e-3)
    finish.test_operator(run, operator, [task])
    result = written["test.json"]["tasks"][task.name]
    assert result["trajectories"] == 10
    for name, one in result["forecasts"].items():
        assert one["scores"]["nrmse"]["all"] == pytest.approx(tables[name]["nrmse"].mean().item())
    own = result["forecasts"]["operator"]["scores"]
    assert own["drift"]["all"] == pytest.approx(tables["operator"]["drift"].mean().item())
    text = capsys.readouterr().out
    assert "step 10" in text and "step 20" not in text
    assert f"{own['nrmse']['all']:11.2e}" in text
    assert (tmp_path / "rollout.png").exists()


@pytest.mark.parametrize("share, best", [(0.9, "bfloat16"), (1.01, "bfloat16"), (1.03, "tf32")])
def test_the_fastest_precision_within_two_percent_is_chosen(monkeypatch, capsys, share, best):
    """An operator that errs `share` times as much in bfloat16, and as much as it does in tf32."""
    task, model = decaying(), types.SimpleNamespace(body=types.SimpleNamespace(lower=None))
    rates = {"float32": -0.1, "tf32": -0.1, "bfloat16": -0.1 * share}

    def rounded(_, precision):
        return lambda z, dt, cond, *_: z * torch.exp((rates[precision] - 1) * cond[:, :1]
                                                     * dt[:, None])[..., None]

    monkeypatch.setattr(choices, "lowered", rounded)
    chosen = choices.choose_precision(Accelerator(cpu=True), task, 0, model, torch.arange(4))
    assert chosen == best and f"in {best} (nRMSE of the val split: bfloat16" in capsys.readouterr(
        ).out
