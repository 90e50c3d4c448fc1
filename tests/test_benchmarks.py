"""The yardsticks of benchmarks/: models against independent formulas, bookkeeping of results."""

import json

import pytest
import torch

from benchmarks import accuracy
from benchmarks.fno import FNO, FNOConfig, Spectral
from benchmarks.unet import UNet, UNetConfig
from ups.config import UsageError
from ups.data.fields import open_fields
from ups.data.make import make


def alive(model):
    """Undo the zero start of the last layer."""
    torch.nn.init.normal_(model.out.weight)
    return model


@pytest.mark.parametrize("grid, modes", [((24,), 5), ((24,), 99), ((12, 16), 4), ((12, 16), 6)])
def test_the_spectral_layer_is_a_truncated_fft(grid, modes):
    layer, x = Spectral(3, grid, modes), torch.randn(2, *grid, 3)
    weight = torch.complex(*layer.weight[:, 0].chunk(2, -1))
    m = min(modes, grid[-1] // 2 + 1)
    axes = tuple(range(1, len(grid) + 1))
    kept = torch.fft.rfftn(x, dim=axes)
    mixed = torch.zeros_like(kept)
    if len(grid) == 1:
        mixed[:, :m] = torch.einsum("bkc,kcd->bkd", kept[:, :m], weight)
    else:
        for i, k in enumerate(range(-modes, modes)):
            part = weight.unflatten(0, (2 * modes, m))[i]
            mixed[:, k, :m] = torch.einsum("bkc,kcd->bkd", kept[:, k, :m], part)
    assert torch.allclose(layer(x), torch.fft.irfftn(mixed, grid, dim=axes), atol=1e-5)


@pytest.mark.parametrize("kind, config, grid", [
    (FNO, FNOConfig(8, 2, 4), (20,)), (FNO, FNOConfig(8, 2, 4), (12, 16)),
    (UNet, UNetConfig(8, 2), (20,)), (UNet, UNetConfig(8, 2), (12, 16))])
def test_a_baseline_on_a_circle_commutes_with_shifts(kind, config, grid):
    x = torch.randn(2, 3, *grid)
    model = kind(config, 3, 2, grid, True)
    assert not model(x).any()  # the step starts as the identity
    shift = 4 if kind is UNet else 3  # a U-Net commutes with shifts by 2 ** levels
    moved = alive(model)(x.roll(shift, -1))
    assert torch.allclose(moved, model(x).roll(shift, -1), atol=1e-5)
    closed = alive(kind(config, 3, 2, grid, False))
    assert closed(x).shape == (2, 2, *grid)
    assert not torch.allclose(closed(x.roll(shift, -1)), closed(x).roll(shift, -1), atol=1e-2)


def test_parameters_are_counted_by_hand_and_odd_sizes_fit():
    count = sum(p.numel() for p in FNO(FNOConfig(8, 2, 4), 3, 2, (20,), True).parameters())
    block = 4 * 8 * 8 * 2 + 3 * (8 * 8 + 8)  # modes, then linear and the two of the mlp
    assert count == 2 * block + (3 * 8 + 8) + (8 * 16 + 16) + (16 * 2 + 2)
    for grid in ((13,), (9, 14)):
        for periodic in (True, False):
            assert UNet(UNetConfig(8, 2), 1, 1, grid, periodic)(torch.ones(1, 1, *grid)).shape[2:] \
                == grid


def test_the_number_of_steps_fits_the_time():
    times = {1: 2.0, 2: 3.0, 3: 5.0}
    steps = accuracy.steps_within(5000.0, times)
    spent = sum(times[accuracy.unroll_at(k, steps, 3)] for k in range(steps))
    assert spent == pytest.approx(5000.0, rel=5e-3)
    assert accuracy.steps_within(100.0, {1: 0.5}) == 200


def test_a_short_training_lowers_the_error(tmp_path):
    make("ns2d", out=tmp_path / "data", samples=20, grid=16, frames=4, t_end=0.3)
    model = ("fno --model.width 8 --model.depth 1 --model.modes 4 --lr 1e-2 --batch_size 4 "
             "--unroll 2 --ema 0.5")
    cell = {"task": "ns2d", "model": model, "seconds": 0.5, "seed": 0, "folder": tmp_path / "data"}
    result = accuracy.train_baseline(cell, tmp_path / "fno", lambda: None)
    fields = open_fields("ns2d", tmp_path / "data")
    u = fields.read(fields.split("test"))
    persistence = accuracy.nrmse(u[:, :-1], u[:, 1:]).mean()
    assert result["one_step"].mean() < 0.9 * persistence
    assert result["rollout"].shape == (2, 3) and len(result["curve"]) == accuracy.MOMENTS
    assert (result["rollout"][:, 0] - result["one_step"][:, 0]).abs().max() < 1e-6


def test_results_are_stored_by_configuration_and_never_trained_twice(tmp_path, capfd):
    """Two processes at once: the operator by its own script, and an FNO."""
    tiny = "--model.depth 1 --model.modes 4 --batch_size 4 --unroll 2"
    models = [f"operator --model.dim 16 {tiny}", f"fno --model.width 8 {tiny}"]
    argv = ["--task", "advection1d", "--preset", "small", "--seconds", "0.5", "--out",
            str(tmp_path), "--models", *models]
    assert not accuracy.main(argv)
    shown = capfd.readouterr().out
    assert "roll-out of operator" in shown and "[" in shown and "params" in shown
    found = sorted(tmp_path.glob("advection1d_*/result.json"))
    results = [json.loads(path.read_text()) for path in found]
    assert len(found) == 2 and all(len(r["rollout"]) == 51 for r in results)
    assert all(r["parameters"] < 20_000 and 1 < len(r["curve"]) <= 8 for r in results)
    assert (tmp_path / "advection1d_0.5s.png").stat().st_size > 10_000
    before = [path.stat().st_mtime_ns for path in found]
    assert not accuracy.main(argv)
    assert [path.stat().st_mtime_ns for path in found] == before
    changed = {"task": "advection1d", "model": f"{models[1]} --lr 1e-4"}
    assert accuracy.settings(changed) != accuracy.settings(changed | {"model": models[1]})


@pytest.mark.parametrize("argv, words", [
    (["--task", "burgers2d"], "burgers2d"), (["--models", "transformer"], "operator, fno or unet"),
    (["--models", "fno --model.wide 3"], "width"), (["--seconds", "0"], "--seconds")])
def test_wrong_use_is_one_sentence(tmp_path, argv, words):
    with pytest.raises(UsageError, match=words):
        accuracy.main(["--out", str(tmp_path), *argv])
    assert not (tmp_path / "data").exists()
