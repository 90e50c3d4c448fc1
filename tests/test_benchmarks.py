"""The yardsticks of benchmarks/: models against independent formulas, bookkeeping of results."""

import json
import math
import os
import shlex
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_operator
from benchmarks import accuracy, apebench, baselines, bench, fno_ns, pdebench, rollout, scale
from benchmarks.networks import FNO, Conv1d, Conv2d, FNOConfig, Spectral, UNet, UNetConfig
from ups.config import UsageError, parse
from ups.data.find import open_fields
from ups.data.make import make
from ups.data.solvers import SOLVERS
from ups.eval.metrics import nrmse
from ups.files import read_json
from ups.simulator import Simulator

PUBLISHED = {"advection1d": (256, 41), "burgers1d": (256, 41), "diffreact2d": (128, 101),
             "swe2d": (128, 101), "darcy2d": (128, 2)}  # points per axis and frames, after strides


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


def test_odd_sizes_fit_a_unet():
    for grid in ((13,), (9, 14)):
        for periodic in (True, False):
            assert UNet(UNetConfig(8, 2), 1, 1, grid, periodic)(torch.ones(1, 1, *grid)).shape[2:] \
                == grid


def test_a_rollout_is_timed_by_plan_beside_solver_and_unet(tmp_path, monkeypatch, capsys):
    def small(task, cfg, out):
        make(task, out=out / "data", samples=30, grid=16, frames=7, t_end=0.6)
        return out / "data", {}

    monkeypatch.setattr(rollout, "make_data", small)
    monkeypatch.setattr(rollout, "chosen_for", lambda *_: ["--model.width", "4"])
    for module in (rollout, baselines):
        monkeypatch.setattr(module, "steps_within", lambda *_: 4)
    rollout.main(["--task", "ns2d", "--strides", "1", "2", "--batch", "3", "--repeats", "1",
                  "--out", str(tmp_path), "--flags",
                  "--model.dim 8 --model.heads 2 --model.depth 2"])
    lines = capsys.readouterr().out.splitlines()
    table = {cells[1].strip(): cells[2:-1] for line in lines
             if len(cells := line.split("|")) > 8}
    error = {name: float(cells[4]) for name, cells in table.items() if name not in ("", "---")}
    assert list(error) == ["solver", "solver, 1/2 of the points", "operator, steps of 1, float32",
                           "operator, steps of 2, float32", "U-Net"]
    assert error["solver"] < 1e-4 < min(list(error.values())[1:])
    sim = Simulator.load(tmp_path / "ns2d" / "run")
    data = open_fields("ns2d", tmp_path / "ns2d" / "data")
    u = data.read(data.split("test"))
    assert (tmp_path / "ns2d.png").stat().st_size > 10_000
    last = sim.rollout(u[:, 0], times=[0.6], stride=2)
    assert nrmse(last, u[:, -1:]).mean().item() == pytest.approx(
        error["operator, steps of 2, float32"], rel=1e-2)


@pytest.mark.parametrize("model", ["fno --model.depth 1 --model.modes 4", "unet --model.levels 1"])
def test_a_short_training_lowers_the_error(tmp_path, monkeypatch, model):
    """The U-Net with random shifts along the axis that is not forced."""
    make("ns2d", out=tmp_path / "data", samples=20, grid=16, frames=4, t_end=0.3)
    monkeypatch.setattr(baselines, "steps_within", lambda seconds, step: 40)
    kind, *flags = model.split()
    flags += "--model.width 8 --lr 1e-2 --batch_size 4 --ema 0.5".split()
    model, result = baselines.train_baseline(cell(kind, "ns2d", tmp_path / "data", flags))
    fields = open_fields("ns2d", tmp_path / "data")
    u = fields.read(fields.split("test"))
    tables = result["tables"]
    again = baselines.errors(model, fields, fields.split("test"), "cpu")  # the best average
    assert torch.equal(again["rollout"], tables["rollout"])
    assert tables["one_step"].mean() < 0.9 * nrmse(u[:, :-1], u[:, 1:]).mean()
    assert tables["rollout"].shape == (2, 3) and len(result["curve"]) == bench.MOMENTS
    assert (tables["rollout"][:, 0] - tables["one_step"][:, 0]).abs().max() < 1e-6


def cell(kind, task, data, flags):
    return {"task": task, "kind": kind, "flags": flags, "seconds": 0.1, "steps": 0, "seed": 0,
            "folder": data, "split": "test"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An operator by its own script beside an FNO, and what the benchmark printed of them."""
    out = tmp_path_factory.mktemp("accuracy")
    tiny = "--model.depth 1 --model.modes 4 --batch_size 4"
    models = [f"operator --model.dim 16 {tiny}", f"fno --model.width 8 {tiny}"]
    argv = ["--task", "advection1d", "--preset", "small", "--seconds", "0.3", "--seed", "3",
            "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:  # the same training, in this process
        patch.setattr(bench, "call", in_this_process)
        assert not accuracy.main([*argv, "--models", *models])
    return out, models, argv


def in_this_process(log, *words):
    words = list(map(str, words))
    if words[0] == "-c":
        accuracy.work(words[-1])
    else:
        preset, out = (words[words.index(flag) + 1] for flag in ("--preset", "--out"))
        make(words[3], out=out, preset=preset, seed=3)


def test_results_are_stored_by_configuration_and_never_trained_twice(small, capfd, monkeypatch):
    out, models, argv = small
    found = sorted(out.glob("*/result.json"))
    fno, operator = results = list(map(read_json, found))
    assert [r["kind"] for r in results] == ["fno", "operator"]
    for r in results:
        assert len(r["scores"]["rollout"]) == 51 and len(r["scores"]["by_lead"]) == 40
        assert r["parameters"] < 20_000 and 1 < len(r["curve"]) <= 8
        assert r["curve"][-1][0] == pytest.approx(r["steps"] * r["step_ms"] / 1e3)
        assert r["data"]["seed"] == r["seed"] == 3
    config = read_json(next(out.glob("*/run/operator/config.json")))
    assert config["seed"] == 3 and config["steps"] == operator["steps"]
    assert (out / "advection1d_0.3s_test_seed3.png").stat().st_size > 10_000

    before = [path.stat().st_mtime_ns for path in found]
    same = f"{models[0]} --size s --model.kernel 0"  # the defaults, said
    monkeypatch.setattr(bench, "call", in_this_process)
    assert not accuracy.main([*argv, "--models", *models, same])
    assert [path.stat().st_mtime_ns for path in found] == before
    shown = capfd.readouterr().out
    ratio = sum(operator["scores"]["rollout"]) / sum(fno["scores"]["rollout"])
    assert f"roll-out of {models[0]} / {models[1]}: {ratio:.2f} [" in shown
    assert shown.count(f"| {models[0]}") == 2
    known = {"kind": "fno", "flags": baselines.chosen_for("fno", "advection1d")}
    changed = known | {"flags": [*known["flags"], "--lr", "1e-4"]}
    assert accuracy.settings(changed) != accuracy.settings(known)

    path = found[0]  # a roll-out that overflowed
    fno["scores"]["rollout"][0] = float("nan")
    text = path.read_text()
    path.write_text(json.dumps(fno))
    assert not accuracy.main([*argv, "--models", *models])
    path.write_text(text)
    shown = capfd.readouterr().out
    assert f"{models[1]}: some roll-outs overflow" in shown and "roll-out of op" not in shown


def test_a_model_that_cannot_be_trained_says_so_in_a_sentence(small, capfd):
    """In a process of its own, as everywhere but in these tests."""
    _, _, argv = small
    assert accuracy.main([*argv, "--models", "operator --codec.kind grid"])
    out, err = capfd.readouterr()
    assert "nRMSE" not in out and "Traceback" not in err
    assert "there is no learned codec yet" in err.split("failed: ")[1]


def test_the_speed_of_a_script_is_that_of_its_last_steps(monkeypatch):
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))

    class Run:
        cfg, step = SimpleNamespace(steps=10), 0

        def progress(self, loader):
            for self.step in loader:
                yield self.step

    script = SimpleNamespace(Run=Run)
    script.main = lambda words: list(script.Run().progress(range(1, 11)))
    assert bench.speed(script, [], steps=8) == 4.0 and script.Run is Run


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_whatever_else_a_benchmark_started_stands_still_while_steps_are_timed(monkeypatch):
    monkeypatch.setenv(bench.MARK, "a test")
    marked, other = (subprocess.Popen(["sleep", "60"], env=os.environ | {bench.MARK: mark})
                     for mark in ("a test", "another"))

    def states():
        time.sleep(0.05)
        return [Path(f"/proc/{one.pid}/stat").read_text().split()[2] for one in (marked, other)]

    try:
        with bench.alone():
            assert states() == ["T", "S"]
        assert states() == ["S", "S"]
    finally:
        marked.kill(), other.kill()


def test_a_sweep_trains_several_at_a_time_and_a_failure_is_seen(tmp_path, monkeypatch, capsys):
    together = threading.Barrier(3, timeout=60)  # passed only by three at once

    def train(cell, folder):
        together.wait()
        return None if "--lr" in cell["flags"] else {"scores": {"rollout": [cell["steps"]]}}

    monkeypatch.setattr(accuracy, "make_data", lambda task, cfg, out: (out / task, {}))
    monkeypatch.setattr(accuracy, "train", train)
    monkeypatch.setattr(accuracy, "report", lambda *_: None)
    argv = ["--task", "ns2d", "swe2d", "burgers1d", "--steps", "70", "--parallel", "3", "--out",
            str(tmp_path), "--models", "operator --size m"]
    assert accuracy.main(argv) is False
    assert capsys.readouterr().out.count("7.00e+01") == 3
    assert accuracy.main([*argv, "operator --lr 1e-3"]) is True


def test_errors_of_several_tasks_become_one_number(capsys):
    """The geometric mean of shares of the first model's errors, here of 1/2 and 2 and 8."""
    tables = {task: {model: {"scores": {"rollout": errors}} for model, errors in models.items()}
              for task, models in {"a": {"x": [1.0, 3.0], "y": [1.0, 1.0]},
                                   "b": {"x": [1.0], "y": [2.0]}, "c": {"x": [1.0], "y": [8.0]}
                                   }.items()}
    accuracy.summary(tables)
    x, y = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[-2:])
    assert [word.strip() for word in y] == ["y", "1.00e+00", "2.00e+00", "8.00e+00", "2.000"]
    assert x[-1].strip() == "1.000"


@pytest.mark.parametrize("flags, moves", [("", [False, True, True]),
                                          ("--shift --no-mirror --no-sums", [True, False, False])])
def test_a_baseline_has_the_moves_that_its_recipe_names(tmp_path, monkeypatch, flags, moves):
    make("advection1d", out=tmp_path / "data", samples=20, grid=16, frames=4)
    seen = []
    monkeypatch.setattr(baselines, "moved", lambda u, fields, *draws: seen.append(draws) or u)
    baselines.train_baseline(cell("fno", "advection1d", tmp_path / "data", [
        *flags.split(), "--model.depth", "1"]))
    assert all([draw is not None for draw in draws] == moves for draws in seen)
    assert [draw.shape[1] for draw in seen[0] if draw is not None] == [
        n for n, wanted in zip((3, 3, 4), moves, strict=True) if wanted]


@pytest.mark.parametrize("argv, words", [
    (["--task", "burgers2d"], "burgers2d"), (["--models", "transformer"], "operator, fno or unet"),
    (["--models", ""], "begins with operator"),
    (["--models", "fno --model.wide 3"], "fno --model.wide 3: .*width"),
    (["--models", "operator --no-compile"], "--compile is the benchmark's"),
    (["--seconds", "inf"], "--seconds"), (["--split", "fit"], "val or test"),
    (["--out", __file__], "cannot be written .File exists")])
def test_wrong_use_is_one_sentence(tmp_path, argv, words):
    with pytest.raises(UsageError, match=words):
        accuracy.main(["--out", str(tmp_path), *argv])
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("task", pdebench.ROWS)
def test_a_published_row_names_flags_that_exist(task):
    making, training, goal = pdebench.ROWS[task]
    cfg = parse(train_operator.Config, ["--tasks", task, *shlex.split(training)])
    solver, given = SOLVERS[task], shlex.split(making)
    assert set(given[::2]) <= {f"--{key}" for key in solver.PARAMS}
    points, frames = PUBLISHED[task]
    preset = solver.PRESETS["pdebench"]
    assert preset["grid"] // cfg.stride_x == points
    assert -(-preset.get("frames", 2) // cfg.stride_t) == frames and 0 < goal < 0.1


@pytest.mark.parametrize("argv, words", [
    (["--flags=--stepz 3"], "--steps"),
    (["--task", "ns2d"], "--task ns2d"),
])
def test_wrong_use_of_the_published_rows_is_known_before_any_work(tmp_path, argv, words):
    with pytest.raises(UsageError, match=words):
        pdebench.main([*argv, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [Conv1d, Conv2d])
@pytest.mark.parametrize("mode", ["circular", "replicate"])
@pytest.mark.parametrize("size, stride, padding", [(1, 1, 0), (2, 2, 0), (3, 1, 1), (3, 2, 1)])
def test_convolutions_are_those_of_torch(kind, mode, size, stride, padding):
    torch.manual_seed(0)
    conv = kind(3, 5, size, stride, padding, padding_mode=mode).double()
    results = []
    for forward in (kind.forward, kind.__base__.forward):
        conv.zero_grad()
        u = torch.linspace(-1, 1, 2 * 3 * 8 * 6, dtype=torch.float64).sin().requires_grad_()
        y = forward(conv, u.view(2, 3, 8, 6) if kind is Conv2d else u.view(2, 3, 48))
        y.square().sum().backward()
        results.append([y, u.grad, conv.weight.grad.clone(), conv.bias.grad.clone()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_the_vorticity_that_the_force_makes_from_rest_has_a_closed_form():
    """w is a function of x + y, so nothing is carried: w = f (1 - exp(-k^2 nu t)) / (k^2 nu)."""
    x = 2 * math.pi / 64 * torch.arange(64, dtype=torch.float64)
    force = 0.1 * ((x[:, None] + x).sin() + (x[:, None] + x).cos())
    w = fno_ns.solve(torch.zeros(1, 64, 64, dtype=torch.float64), 5, 2.0)[0]
    for t in range(5):
        rate = 8 * math.pi**2 * 1e-5  # k^2 nu on the unit square
        assert torch.allclose(w[t], force * -math.expm1(-rate * t) / rate, atol=1e-9)


def test_initial_vorticity_has_the_published_variance_and_no_mean():
    w = fno_ns.initial(200, 64, torch.Generator().manual_seed(0))
    k = torch.fft.fftfreq(64, 1 / 64, dtype=torch.float64)
    power = 7**3 * (4 * math.pi**2 * (k[:, None] ** 2 + k**2) + 49) ** -2.5
    assert w.var().item() == pytest.approx(2 * (power.sum() - power[0, 0]).item(), rel=0.05)
    assert w.mean((1, 2)).abs().max() < 1e-12


def test_the_score_is_a_geometric_mean_and_overflow_is_infinite():
    errors = [1e-2, 1e-4] * (apebench.LEADS // 2)
    assert apebench.score({"nrmse": [*errors, 7.0]}) == pytest.approx(1e-3)
    for wrong in ([], errors[1:], [math.nan, *errors], [math.inf, *errors]):
        assert apebench.score({"nrmse": wrong}) == math.inf


def test_a_scenario_of_any_number_of_axes_becomes_a_file(tmp_path):
    for axes in (1, 2, 3):
        u = torch.rand(4, 3, 1, *[8] * axes)
        apebench.write_data(SimpleNamespace(
            num_spatial_dims=axes, test_temporal_horizon=4, get_train_data=lambda u=u: u,
            get_test_ic_set=lambda u=u: u[:, 0]), tmp_path / str(axes))
        facts = open_fields("data", tmp_path / str(axes) / "data.h5").facts
        assert facts.boundary == ("periodic",) * axes and facts.frames == 3


def test_the_products_of_a_large_step_are_counted():
    """Rows times those of one; an MLP has 2 * 3 * 2 * 2 dim^2 operations for each token."""
    tokens, sizes, how = (1, 64, 64), {"dim": 64, "depth": 2, "modes": 2}, "bf16 recompute"
    model, z = scale.build(1, tokens, sizes, how, 16, "cpu")
    assert torch.isfinite(scale.loss_of(model, z))
    count = scale.flops(1, tokens, sizes, 16, "cpu")
    assert scale.flops(3, tokens, sizes, 16, "cpu") == 3 * count
    more = scale.flops(1, tokens, sizes | {"depth": 3}, 16, "cpu") - count
    assert more > 16 * 3 * 2 * 6 * 16**2
    assert model.body.config.precision == "bfloat16"
