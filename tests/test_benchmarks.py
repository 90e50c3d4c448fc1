"""The yardsticks of benchmarks/: models against independent formulas, bookkeeping of results."""

import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import train_operator
from benchmarks import (
    accuracy,
    baselines,
    chosen,
    pdebench,
    ratios,
    speed,
    step,
    turns,
    watched,
)
from benchmarks.fno import FNO, FNOConfig, Spectral
from benchmarks.unet import Conv1d, Conv2d, UNet, UNetConfig, doubled
from ups.config import UsageError, parse
from ups.data.find import open_fields
from ups.data.make import make
from ups.data.solvers import SOLVERS
from ups.eval.metrics import nrmse
from ups.eval.protocol import PUBLISHED


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
    assert turns.steps_within(100.0, 0.5) == 200 and turns.steps_within(1.0, 0.5) == 8
    marks = [(0, 0.0), (10, 30.0), (20, 32.0), (30, 53.0)]
    assert turns.step_seconds(marks) == 0.2  # the least of 3, 0.2 and 2.1


@pytest.mark.parametrize("tasks, on_a_card, elsewhere", [
    (["burgers1d"], 20, 1), (["burgers1d", "swe2d", "ns2d"], 21, 3)])
def test_steps_are_timed_in_whole_rounds_of_all_tasks(tasks, on_a_card, elsewhere):
    cfg = parse(train_operator.Config, ["--tasks", *tasks])
    assert [watched.chunk_of(cfg, cuda) for cuda in (True, False)] == [on_a_card, elsewhere]


def test_whoever_times_its_steps_is_alone(tmp_path):
    """Three threads with locks of their own: two train, one comes and times."""
    trainers, at = [turns.Turns(tmp_path) for _ in range(2)], []

    def train(me):
        for _ in range(4 * turns.PATIENCE):
            me.step()
            at.append("train")
            time.sleep(1e-4)
        me.room.close()

    threads = [threading.Thread(target=train, args=[me]) for me in trainers]
    for thread in threads:
        thread.start()
    with turns.Turns(tmp_path).alone():
        before = len(at)
        time.sleep(0.2)
        assert len(at) == before < 8 * turns.PATIENCE
        at.append("alone")
    for thread in threads:
        thread.join(20)
    assert len(at) == 8 * turns.PATIENCE + 1


@pytest.mark.parametrize("model", ["fno --model.depth 1 --model.modes 4", "unet --model.levels 1"])
def test_a_short_training_lowers_the_error(tmp_path, monkeypatch, model):
    """The U-Net with random shifts along the axis that is not forced."""
    make("ns2d", out=tmp_path / "data", samples=20, grid=16, frames=4, t_end=0.3)
    monkeypatch.setattr(baselines, "steps_within", lambda seconds, step: 40)
    kind, *flags = model.split()
    flags += "--model.width 8 --lr 1e-2 --batch_size 4 --ema 0.5".split()
    cell = {"tasks": ["ns2d"], "model": model, "kind": kind, "flags": flags, "seconds": 0.5,
            "seed": 0, "folder": tmp_path / "data", "split": "test"}
    result = baselines.train_baseline(cell, tmp_path / "out", turns.Turns(tmp_path))
    fields = open_fields("ns2d", tmp_path / "data")
    u = fields.read(fields.split("test"))
    persistence = nrmse(u[:, :-1], u[:, 1:]).mean()
    tables = result["tables"]["ns2d"]
    assert tables["one_step"].mean() < 0.9 * persistence
    assert tables["rollout"].shape == (2, 3) and len(result["curve"]) == baselines.MOMENTS
    assert (tables["rollout"][:, 0] - tables["one_step"][:, 0]).abs().max() < 1e-6


def test_results_are_stored_by_configuration_and_never_trained_twice(tmp_path, capfd):
    """An operator by its own script beside an FNO; then one operator for two tasks."""
    tiny = "--model.depth 1 --model.modes 4 --batch_size 4"
    models = [f"operator --model.dim 16 {tiny}", f"fno --model.width 8 {tiny}"]
    common = ["--preset", "small", "--seconds", "0.3", "--seed", "3", "--out", str(tmp_path)]
    assert not accuracy.main(["--task", "advection1d", "--models", *models, *common])
    shown, told = capfd.readouterr()
    assert "1 of 2 have ended: advection1d_" in told and "2 of 2 have ended" in told
    assert "roll-out of operator" in shown and "[" in shown and "params" in shown
    assert "compile" in shown and "a CPU tries the command" in shown
    assert "of several commits" not in shown
    argv = ["--task", "advection1d", "burgers1d", "--models", models[0], "--joint", models[0],
            *common]
    assert not accuracy.main(argv)
    assert capfd.readouterr().out.count("roll-out of one operator") == 2
    found = sorted(tmp_path.glob("*/result.json"))
    results = [json.loads(path.read_text()) for path in found]
    assert [len(r["tasks"]) for r in results] == [2, 1, 1, 1]
    assert results[0]["seconds"] == 0.6 and results[1]["seconds"] == 0.3
    assert all(len(s["rollout"]) == 51 for r in results for s in r["scores"].values())
    assert all(r["parameters"] < 20_000 and 1 < len(r["curve"]) <= 8 for r in results)
    assert all(0 < r["compile_s"] < 600 for r in results)
    assert {r["code"] for r in results} == {accuracy.version()}
    assert all(r["curve"][-1][0] > 0.5 * r["seconds"] for r in results)
    configs = [json.loads(path.read_text()) for path in tmp_path.glob("*/run/operator/config.json")]
    assert [config["seed"] for config in configs] == [3, 3, 3]
    assert all(about["seed"] == 3 for r in results for about in r["data"].values())
    assert (tmp_path / "advection1d_0.3s_seed3.png").stat().st_size > 10_000
    before = [path.stat().st_mtime_ns for path in found]
    assert not accuracy.main(argv)
    assert [path.stat().st_mtime_ns for path in found] == before
    cell = {"kind": "fno", "flags": accuracy.flags_of(models[1], ["advection1d"])}
    changed = cell | {"flags": [*cell["flags"], "--lr", "1e-4"]}
    assert accuracy.settings(changed) != accuracy.settings(cell)

    # error against cost: the errors are those of the last frame, the solver has none
    speed.main(["--task", "advection1d", "--results", str(tmp_path), "--batches", "1", "64",
                "--repeats", "1"])
    rows = json.loads((tmp_path / "advection1d_speed.json").read_text())["rows"]
    assert rows["solver"]["nrmse"] < 1e-5 < rows["solver, 1/4 of the points"]["nrmse"]
    for r in results:
        if r["tasks"] == ["advection1d"]:
            last = r["scores"]["advection1d"]["by_lead"][-1]
            assert rows[r["kind"]]["nrmse"] == pytest.approx(last, rel=1e-4)

    other = tmp_path / "advection1d_fno_other"  # better, but trained on other data
    other.mkdir()
    fno, = (r for r in results if r["kind"] == "fno")
    (other / "result.json").write_text(json.dumps(
        fno | {"folder": str(other), "curve": [[0.3, 0.0]]}))
    cfg = speed.Config(task="advection1d", results=str(tmp_path))
    assert speed.stored(cfg, "fno") == other != speed.stored(cfg, "fno", fno["folder"])
    assert speed.stored(cfg, "fno", tmp_path) is None
    shutil.rmtree(other)

    # two names of one configuration: a row for each, from one training
    twice = [models[0], f"{models[0]} --model.input_whitening 1"]  # 1-D tasks have it anyway
    capfd.readouterr()
    assert not accuracy.main(["--task", "advection1d", "--models", *twice, models[1], *common])
    shown = capfd.readouterr().out
    assert [shown.count(f"\n{name}  ") for name in twice] == [1, 1], shown

    # a roll-out that overflowed, a name of another day, a cell that another call is training
    path, = tmp_path.glob("*_fno_*/result.json")
    result = json.loads(path.read_text()) | {"model": "once", "code": "1234567"}
    result["scores"]["advection1d"]["rollout"][0] = float("nan")
    path.write_text(json.dumps(result))
    capfd.readouterr()
    assert not accuracy.main(["--task", "advection1d", "--models", *models, *common])
    shown = capfd.readouterr().out
    assert f"{models[1]}: some roll-outs overflow" in shown and "roll-out of op" not in shown
    assert "once" not in shown and f"{models[1]} 1234567 (" in shown
    lock = accuracy.reserve(path.parent)
    path.unlink()
    with pytest.raises(UsageError, match="trained by another call"):
        accuracy.main(["--task", "advection1d", "--models", *models, *common])
    lock.close()

    # a model that does not fit the data says so in a sentence
    assert accuracy.main(["--task", "advection1d", "--models", "operator --patch 3", *common])
    out, err = capfd.readouterr()
    assert "nRMSE" not in out and "| " not in err.split("failed: ")[1] and "--patch" in err, err


def test_the_step_benchmark_asks_the_script_for_what_it_means(tmp_path):
    for cfg in step.settings(tmp_path, "ns2d", 4):
        assert parse(train_operator.Config, step.command_line(cfg)) == cfg


def test_a_joint_operator_has_no_flags_of_a_single_task():
    assert accuracy.flags_of("operator", ["advection1d"])[-2:] == ["--model.modes", "129"]
    assert accuracy.flags_of("operator", ["ns2d"])[-2:] == ["--model.input_whitening", "0.5"]
    joint = accuracy.flags_of("operator --patch 2", ["advection1d", "ns2d"])
    assert joint == [*chosen.FLAGS["operator", 2].split(), "--patch", "2"]
    cell = {"kind": "operator", "flags": joint, "tasks": ["advection1d", "ns2d"]}
    assert accuracy.settings(cell)["patch"] == 2


def test_a_joint_operator_is_compared_with_every_single_one(tmp_path, capsys):
    def result(tasks, errors):
        scores = {"rollout": errors, "one_step": errors, "by_lead": [1.0, 2.0]}
        return {"tasks": tasks, "kind": "operator", "scores": {"ns2d": scores}, "seconds": 1.0,
                "data": {"ns2d": {}}, "device": "CPU", "at": "today", "split": "test", "seed": 0,
                "steps": 1, "parameters": 1, "batch_size": 1, "step_ms": 1.0,
                "curve": [(1.0, 0.1)]}

    ratios.report("ns2d", {"joint": result(["ns2d", "burgers1d"], [3.0, 3.0]),
                           "slow": result(["ns2d"], [2.0, 2.0]),
                           "fast": result(["ns2d"], [1.0, 2.0]) | {"curve": [(1.5, 0.1)]}},
                  tmp_path)
    shown = capsys.readouterr().out
    assert "fast: 1 steps, the fewest, take 1.5 s." in shown and shown.count("fewest") == 1
    assert "roll-out of joint / slow: 1.50 [1.50, 1.50]" in shown
    assert "roll-out of joint / fast: 2.00 [1.50, 3.00]" in shown


@pytest.mark.parametrize("flags, moves", [("", [False, True, True]), ("--shift --no-mirror", [
    True, False, True]), ("--no-sums", [False, True, False])])
def test_a_baseline_has_the_moves_that_its_recipe_names(tmp_path, monkeypatch, flags, moves):
    make("advection1d", out=tmp_path / "data", samples=20, grid=16, frames=4)
    seen = []
    monkeypatch.setattr(baselines, "moved", lambda u, fields, *draws: seen.append(draws) or u)
    cell = {"tasks": ["advection1d"], "model": "fno", "kind": "fno", "seconds": 0.1, "seed": 0,
            "flags": [*flags.split(), "--model.depth", "1"], "folder": tmp_path / "data",
            "split": "val"}
    baselines.train_baseline(cell, tmp_path / "out", turns.Turns(tmp_path))
    assert all([draw is not None for draw in draws] == moves for draws in seen)
    assert [draw.shape[1] for draw in seen[0] if draw is not None] == [
        n for n, wanted in zip((3, 3, 4), moves, strict=True) if wanted]


@pytest.mark.parametrize("argv, words", [
    (["--task", "burgers2d"], "burgers2d"), (["--models", "transformer"], "operator, fno or unet"),
    (["--models", "fno --model.wide 3"], "width"), (["--joint", "fno"], "--joint fno"),
    (["--joint", "operator"], "for several tasks"),
    (["--models", "fno --model.wide 3"], "fno --model.wide 3: "), (["--seed", "-1"], "--seed"),
    (["--models", "unet --model.levels -1"], "--model.levels must be between 0 and 8"),
    (["--models", "fno --model.width 0"], "--model.width must be at least 1"),
    (["--models", "fno", "--lr", "4"], "no field --lr; .* into its quotes: --models"),
    (["--models", "fno --lr '4"], "not closed"), (["--seconds", "inf"], "--seconds"),
    (["--models", "operator --seed=3"], "--seed is the"),
    (["--joint", "operator --no-compile"], "--compile is the benchmark's"),
    (["--seconds", "0"], "--seconds"), (["--split", "fit"], "val or test"),
    (["--preset", "tiny"], "--preset tiny: burgers1d has small, medium, pdebench"),
    (["--task", "ns2d", "--preset", "pdebench"], "--preset pdebench: ns2d has small, medium"),
    (["--task", "cns1d"], "--task cns1d: it is one of"),
    (["--out", __file__], "--out .*: it cannot be made .File exists")])
def test_wrong_use_is_one_sentence(tmp_path, argv, words):
    with pytest.raises(UsageError, match=words):
        accuracy.main(["--out", str(tmp_path), *argv])
    assert not (tmp_path / "data").exists()


def test_a_training_whose_benchmark_has_died_does_not_begin():
    code = "from benchmarks.accuracy import work; work('missing.json', 1)"
    done = subprocess.run([sys.executable, "-c", code], cwd=accuracy.ROOT, capture_output=True)
    assert done.returncode == 1 and not done.stderr


@pytest.mark.parametrize("task", pdebench.ROWS)
def test_a_published_row_names_flags_that_exist(task):
    making, training, goal = pdebench.ROWS[task]
    cfg = parse(train_operator.Config, ["--tasks", task, *shlex.split(training)])
    solver, given = SOLVERS[task], shlex.split(making)
    assert {key: float(value) for key, value in zip(given[::2], given[1::2], strict=True)}.keys() \
        <= {f"--{key}" for key in solver.PARAMS}
    points, frames = PUBLISHED[task]
    preset = solver.PRESETS["pdebench"]
    assert preset["grid"] // cfg.stride_x == points
    assert -(-preset.get("frames", 2) // cfg.stride_t) == frames and 0 < goal < 0.1


@pytest.mark.parametrize("argv, words", [
    (["--flags=--stepz 3"], "--steps"),
    (["--flags=--steps '3"], "a quotation mark is not closed"),
    (["--task", "ns2d"], "--task ns2d"),
])
def test_wrong_use_of_the_published_rows_is_known_before_any_work(tmp_path, argv, words):
    with pytest.raises(UsageError, match=words):
        pdebench.main([*argv, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_failing_row_leaves_the_others_and_a_finished_one_is_not_done_again(
        tmp_path, monkeypatch, capsys):
    calls = []

    def call(log, *line):
        calls.append((log.name.split(".")[0], line[0] if line[0] != "-m" else line[1]))
        run = tmp_path / "runs" / calls[-1][0]
        if calls[-1] == ("burgers1d", "train_operator.py"):
            raise pdebench.Failed("the loss is nan")
        if line[0] == "train_operator.py":
            run.mkdir(parents=True, exist_ok=True)
        if line[0] == "evaluate.py":
            (run / "evaluation_pdebench").mkdir()
            score = {"operator": {"scores": {"nrmse": {"all": 0.25, "interval": [0.1, 0.5]}}}}
            (run / "evaluation_pdebench" / "metrics.json").write_text(json.dumps(
                {"tasks": {run.name: {"forecasts": score, "protocol": "as published"}}}))

    monkeypatch.setattr(pdebench, "call", call)
    argv = ["--task", "burgers1d", "swe2d", "--out", str(tmp_path)]
    assert pdebench.main(argv) is True
    assert calls == [("burgers1d", "ups.data"), ("burgers1d", "train_operator.py"),
                     ("swe2d", "ups.data"), ("swe2d", "train_operator.py"),
                     ("swe2d", "evaluate.py")]
    shown = capsys.readouterr()
    assert "burgers1d: the loss is nan" in shown.err and "burgers1d" not in shown.out
    assert "swe2d         2.50e-01  1.00e-01 to 5.00e-01   1.9e-03 " in shown.out
    assert "as published" in shown.out and "nan" not in shown.out
    calls.clear()
    assert pdebench.main([*argv[:1], "swe2d", *argv[3:]]) is False
    assert calls == [("swe2d", "ups.data"), ("swe2d", "train_operator.py")]  # they see it is done
    assert "1.9e-03      nan  as published" in capsys.readouterr().out


def test_a_command_of_the_published_rows_says_why_it_failed_and_ends_with_its_parent(tmp_path):
    log = tmp_path / "log.txt"
    with pytest.raises(pdebench.Failed, match="ended with 3: error: no luck"):
        pdebench.call(log, "-c", "print('error: no luck\\nbye'); raise SystemExit(3)")
    with pytest.raises(pdebench.Failed, match="ended with 1: KeyError: 'luck'"):  # this call's own
        pdebench.call(log, "-c", "{}['luck']")
    with pytest.raises(pdebench.Failed, match="^ups.data ended with 2: error: there is no solver"):
        pdebench.call(log, "-m", "ups.data", "make", "luck")
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); " \
            "time.sleep(300)"
    code = "from pathlib import Path; from benchmarks import pdebench; " \
           f"pdebench.call(Path({str(log)!r}), '-c', {child!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=accuracy.ROOT,
                              stderr=subprocess.DEVNULL)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    pid = (tmp_path / "pid").read_text()
    until(lambda: not Path(f"/proc/{pid}").exists()
          or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


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


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_doubled_grid_has_every_point_twice_along_each_axis(axes):
    x = torch.randn(2, 3, *[4, 5, 6][:axes], requires_grad=True)
    fine = doubled(x)
    assert torch.equal(fine, F.interpolate(x, scale_factor=2))
    weight = torch.randn_like(fine)
    ours, = torch.autograd.grad((weight * fine).sum(), x)
    theirs, = torch.autograd.grad((weight * F.interpolate(x, scale_factor=2)).sum(), x)
    assert torch.allclose(ours, theirs, atol=1e-6)
