"""The main script on tiny data: from nothing to a table, one and two processes, wrong use."""

import json
import shutil
import statistics
import types

import h5py
import pytest
import torch
from accelerate import Accelerator
from launching import ROOT, launch

import train_operator as script
from ups.config import UsageError, parse
from ups.data.make import make
from ups.eval.plots import draw_rollouts
from ups.latents import TaskLatents, open_tasks
from ups.models.body import BodyConfig
from ups.models.latent_operator import LatentOperator
from ups.train.step import CudaGraphed, exact_inference

TINY = ["--steps", "12", "--batch_size", "8", "--log_every", "1", "--eval_every",
        "6", "--save_every", "6", "--warmup", "4", "--model.dim", "16", "--model.depth", "2",
        "--model.modes", "4", "--val_trajectories", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tiny files of four tasks; burgers1d with two viscosities."""
    folder = tmp_path_factory.mktemp("data")
    make("burgers1d", out=folder, samples=40, grid=32, frames=9, nu=[0.01, 0.1])
    make("advection1d", out=folder, samples=40, grid=32, frames=7)
    make("darcy2d", out=folder, samples=40, grid=16)
    make("diffreact2d", out=folder, samples=40, grid=16, frames=14, t_end=1.0)
    return folder


def flags(tmp_path, data, *more, run="run"):
    return ["--run", str(tmp_path / run), "--data", str(data), "--tasks", "burgers1d", "--cache",
            str(tmp_path / "cache"), *TINY, *map(str, more)]


def losses(folder):
    lines = map(json.loads, (folder / "operator" / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def numbers(folder):
    return json.loads((folder / "operator" / "test.json").read_text())["tasks"]


def error(result, name):
    return result["forecasts"][name]["scores"]["nrmse"]["all"]


def opened(tmp_path, data, *more):
    """The only task of these flags: codec and cache, and no training."""
    cfg = parse(script.Config, flags(tmp_path, data, *more))
    (task,) = open_tasks(Accelerator(cpu=True), cfg, "train")
    return task


def test_from_nothing_to_a_table_and_the_same_command_again(tmp_path, capsys, monkeypatch):
    real = script.open_latents

    def small(accelerator, cfg, *args, **options):  # the default data, but fewer of them
        make("burgers1d", out=cfg.data[0], samples=40, grid=32, frames=9, t_end=0.4)
        return real(accelerator, cfg, *args, **options)

    monkeypatch.setattr(script, "open_latents", small)
    monkeypatch.setattr("ups.eval.finish.draw_rollouts", draw_rollouts)
    script.main(flags(tmp_path, tmp_path / "data", "--steps", 60))
    shown = capsys.readouterr().out
    assert "step 1" in shown and "step 5" in shown and "step 10" not in shown
    assert "persistence" in shown and "codec floor" in shown and "physical units" in shown
    stage = tmp_path / "run" / "operator"
    assert "given frames are not counted" in json.loads((stage / "test.json").read_text())[
        "definitions"]["nrmse"]
    result = numbers(tmp_path / "run")["burgers1d"]
    assert result["trajectories"] == 4 and 0 < error(result, "codec") <= 1e-3
    assert error(result, "operator") < error(result, "persistence")
    assert (stage / "rollout.png").stat().st_size > 20_000
    assert json.loads((stage / "exit.json").read_text())["status"] == "done"
    before = {p: p.read_bytes() for p in stage.rglob("*") if p.is_file() and p.name != ".lock"}
    script.main(flags(tmp_path, tmp_path / "data", "--steps", 60))
    assert "is finished (step 60)" in capsys.readouterr().out
    assert all(path.read_bytes() == content for path, content in before.items())


TOGETHER = ["--tasks", "burgers1d", "advection1d", "--noise", "0.05", "--strides", "2", "1",
            "--steps", "8", "--eval_every", "3"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    script.main(flags(folder, data, *TOGETHER))
    return folder


@pytest.mark.parametrize("under", ["ddp", "fsdp"])
def test_two_processes_give_the_same_curve(alone, data, under):
    """Rank 1 has no trajectory to measure here, and must compute all the same.

    An evaluation without a checkpoint after it must not leave its averaged weights behind.
    """
    helpers, two = ROOT / "tests" / "train", flags(alone, data, *TOGETHER, run=under)
    done = (launch(ROOT / "train_operator.py", *two) if under == "ddp" else
            launch(helpers / "operator_under_fsdp.py", *two, config="2gpu_fsdp.yaml",
                   env={"PYTHONPATH": f"{ROOT}:{helpers}"}))
    assert done.returncode == 0, done.stderr
    one, both = losses(alone / "run"), losses(alone / under)
    assert len(one) == len(both) == 8
    assert max(abs(a - b) for a, b in zip(one, both, strict=True)) < 1e-5
    assert all(0.3 < loss < 5 for loss in one[:4])  # of two tasks and strides, at the identity
    a, b = (numbers(alone / name)["burgers1d"] for name in ("run", under))
    assert a["trajectories"] == b["trajectories"] == 8  # four samples of two files
    assert error(a, "operator") == pytest.approx(error(b, "operator"), rel=1e-3)


def test_several_tasks_and_a_family_in_one_run(tmp_path, data):
    tasks = ["burgers1d:nu=0.01,0.1", "advection1d", "darcy2d", "diffreact2d"]
    script.main(flags(tmp_path, data, "--tasks", *tasks, "--steps", "8"))
    stage, test = tmp_path / "run" / "operator", numbers(tmp_path / "run")
    assert set(test) == {"burgers1d", "advection1d", "darcy2d", "diffreact2d"}
    darcy, burgers = (test[name]["forecasts"]["operator"]["scores"]
                      for name in ("darcy2d", "burgers1d"))
    assert len(darcy["nrmse"]["by_lead"]) == 1 and test["burgers1d"]["trajectories"] == 8
    assert 0 < burgers["drift"]["all"] < 1
    assert "drift" not in darcy  # a task that conserves nothing joins in
    scores = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in scores if "val/nrmse_rollout" in line][-1]
    mean = statistics.geometric_mean(last[f"val/{task}/nrmse_rollout"] for task in test)
    assert last["val/nrmse_rollout"] == pytest.approx(mean)
    config = json.loads((stage / "model" / "config.json").read_text())
    names = [task["params"] for task in config["tasks"]]
    assert names == [["nu"], ["beta"], ["beta"], ["Du", "Dv", "k"]]
    assert all((stage / f"rollout_{task}.png").exists() for task in test)
    # at the start the operator is the identity: the loss of every task is that of persistence
    assert all(0.3 < loss < 5 for loss in losses(tmp_path / "run")[:4])  # early frames change most


def test_moved_latents_are_the_latents_of_moved_fields(tmp_path, data):
    task = opened(tmp_path, data, "--tasks", "advection1d", "--codec.components", "all")
    task.width = 6
    u = torch.randn(3, 2, 1, 32)
    z = task.encode(u)
    assert z.shape[-1] == 6 and torch.allclose(task.decode(z), u, atol=1e-5)
    shift = torch.tensor([[0, 0, 0], [0, 0, 5 / 32], [0, 0, 0.99]])
    mirror = torch.tensor([[0.9, 0, 0], [0.1, 0, 0], [0.1, 0, 0]])
    added = torch.tensor([[0, 0, 0.25, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    expected = torch.stack([u[0] + u[0].roll(8, -1), -u[1].roll(5, -1), -u[2].roll(31, -1)])
    got = task.decode(task.augment(z, torch.cat([shift, mirror, added], 1))[0])
    assert torch.allclose(got, expected, atol=1e-5)


def test_moves_have_random_numbers_of_their_own():
    cfg = script.Config(steps=10, batch_size=6, noise=0.0)
    whole, part, later = (
        script.draw({"rows": torch.tensor(rows), "step": step}, cfg)["move"]
        for step, rows in ((3, [0, 1, 2, 3, 4, 5]), (3, [4, 1]), (4, [4, 1])))
    assert whole.shape == (6, 10) and len(whole.unique()) == 60  # shift, mirror, sum
    assert torch.equal(part, whole[[4, 1]]) and not (later == part).any()


@pytest.mark.parametrize("more, words", [
    (["--tasks", "burgers2d"], "burgers2d"),
    (["--tasks", "burgers1d", "burgers1d"], "twice"),
    (["--tasks", "burgers1d:nu=7"], "nu"),
    (["--codec.kind", "grid"], "data0 --tasks burgers1d`, or use --codec.kind patch"),
    (["--model.body", "mamba"], "mamba"),
    (["--codec.components", "99"], "99"),
    (["--steps", "0"], "--steps must be at least 1"),
    (["--stride_x", "5"], "stride_x 5 does not divide"),
    (["--codec.dtype", "int8"], "--codec.dtype int8"),
    (["--model.modes", "-1"], "--model.modes must be at least 0, not -1"),
    (["--strides", "2"], "--strides 2: 1 must be among them"),
    (["--strides", "1", "9"], "--strides 9, --history 1: burgers1d has 9 frames, so"),
    (["--history", "2", "--strides", "1", "2"], "frames of one distance are seen"),
])
def test_wrong_use_is_one_sentence(tmp_path, data, more, words):
    with pytest.raises(UsageError) as caught:
        script.main(flags(tmp_path, data, *more))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "operator" / "exit.json").exists()


def test_fp16_is_refused(tmp_path, data, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # as a launcher says it
    with pytest.raises(UsageError, match="mixed_precision fp16 is not supported"):
        script.main(flags(tmp_path, data))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sample", [20, 0])  # of training, of the test split
def test_nan_in_the_data_is_named(tmp_path, data, sample):
    path = next(data.glob("burgers1d_nu0.01*"))
    shutil.copy(path, tmp_path)
    with h5py.File(tmp_path / path.name, "r+") as file:
        file["u"][sample, 3, 5] = float("nan")
    with pytest.raises(UsageError, match=f"NaN or Inf in sample {sample}, .*ups.data validate"):
        script.main(flags(tmp_path, tmp_path))
    assert not (tmp_path / "run" / "operator").exists()  # before any training


def test_a_run_is_of_its_data_codec_and_configuration(tmp_path, data):
    """What was made with others is refused, and the record of the last launch stays."""
    first = flags(tmp_path, data, "--tasks", "burgers1d:nu=0.01", "--steps", "6")
    script.main(first)
    end = tmp_path / "run" / "operator" / "exit.json"
    end.write_text(end.read_text().replace("done", "stopped"))
    before = end.read_bytes()
    with pytest.raises(UsageError, match="another configuration: lr"):
        script.main([*first, "--lr", "1"])
    assert end.read_bytes() == before
    shutil.rmtree(tmp_path / "run" / "operator")
    with pytest.raises(UsageError, match="was made for other data"):
        script.main([*first, "--tasks", "burgers1d:nu=0.1"])
    with pytest.raises(UsageError, match="with --codec.components auto, .* now --codec.components"
                                         " 3, .*; use the old values, give another --run, or"):
        script.main([*first, "--codec.components", "3"])


def test_a_step_that_diverges_ends_the_run_with_its_number(tmp_path, data):
    with pytest.raises(FloatingPointError, match="at step .*lower --lr"):
        script.main(flags(tmp_path, data, "--lr", "1e30", "--grad_clip", "1e30", "--warmup", "1"))
    end = json.loads((tmp_path / "run" / "operator" / "exit.json").read_text())
    assert end["status"] == "failed" and "the loss is nan" in end["reason"]


def task_of(weight, z=None, width=2):
    codec = types.SimpleNamespace(weight=weight, width=2)
    return TaskLatents(None, codec, "", cache=types.SimpleNamespace(z=[z]), width=width)


def test_noise_is_in_units_of_the_windows_own_change_and_fades():
    """Channels that count 3 to 1; the first moves, by 0 to 9 in ten windows, the second stays."""
    task = task_of(torch.tensor([1.5, 0.5]))
    cfg = script.Config(steps=100, batch_size=512, noise=2.0, noise_end=0.08, augment=False)
    z = torch.zeros(512, 2, 64, 2)
    z[:, 1, :, 0] = (torch.arange(512.0) % 10)[:, None]
    change = z[:, 1, 0, 0] * (3 / 4) ** 0.5

    def deviations(step):
        batch = script.draw({"z": z, "rows": torch.arange(512), "step": step}, cfg)
        noise = task.noise(*z.unbind(1), batch) / task.noise_scale
        assert noise.mean(1).abs().max() < 1e-5  # no conserved mean moves
        return noise.flatten(1).std(1)

    for step, most in ((0, 2.0), (50, 0.4), (100, 0.08)):
        noise = deviations(step)
        assert (noise[change == 0] == 0).all()
        share = noise[change > 0] / change[change > 0] / most  # uniform, from 0
        assert 0.9 < share.max() < 1.3 and share.min() < 0.02
        assert share.mean().item() == pytest.approx(0.5, abs=0.05)


def test_parts_of_the_loss_are_the_same_compiled(monkeypatch, traced):
    noise, level = torch.randn(4, 8, 3), torch.rand(4)
    task = task_of(torch.tensor([2.0, 1.0]), width=3)  # the last channel is padding

    def values(z):
        batch = {"level": level, "noise": noise}
        first = (z[:, 0] + task.noise(*z.unbind(1), batch)).requires_grad_()
        assert torch.equal(first[..., 2], z[:, 0, :, 2])
        error = task.relative_error(first, z[:, -1])
        return first, error, *torch.autograd.grad(error.sum(), first)

    windows = [torch.randn(4, 2, 8, 3) for _ in range(2)]
    plain, stats = [values(z) for z in windows], torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    monkeypatch.setattr(CudaGraphed, "running", True)
    for z, expected in zip(windows, plain, strict=True):
        for one, other in zip(expected, values(z), strict=True):
            assert torch.allclose(one, other, atol=1e-6)
    assert stats["unique_graphs"] == before + 2


def test_evaluation_compiles_nothing():
    graphs = []
    double = torch.compile(lambda x: 2 * x, dynamic=False,
                           backend=lambda graph, _: graphs.append(1) or graph.forward)
    for function, size, count in ((double, 3, 1), (exact_inference(double), 4, 1), (double, 5, 2)):
        assert function(torch.ones(size)).sum() == 2 * size
        assert len(graphs) == count


def test_the_mean_change_in_a_step_counts_channels_by_their_share_of_the_field():
    """Channels that count 3 to 1: the first moves by 1, then by 3, the second stays."""
    z = torch.tensor([[0.0, 5.0], [1.0, 5.0], [4.0, 5.0]])[None, :, None].expand(1, 3, 7, 2)
    task = task_of(torch.tensor([3.0, 1.0]), z)
    task.strides = 1, 2
    assert task.typical_change == pytest.approx({1: (1 + 3) / 2 * (3 / 4) ** 0.5,
                                                 2: 4 * (3 / 4) ** 0.5})
    task = task_of(torch.tensor([3.0, 1.0]), 0 * z)
    assert task.typical_change == {1: 1.0}  # where nothing ever changes
    task = task_of(torch.tensor([3.0, 1.0]), z)
    task.cache.z.append(2 * z)  # shards of one trajectory each
    assert task.typical_change == pytest.approx({1: (1 + 3 + 2 + 6) / 4 * (3 / 4) ** 0.5})


def test_a_forced_axis_is_not_shifted_and_the_operator_sees_the_place(tmp_path):
    make("ns2d", out=tmp_path / "data", samples=20, grid=16, frames=3, t_end=0.2)
    task = opened(tmp_path, tmp_path / "data", "--tasks", "ns2d")
    spec = task.spec
    assert spec.periodic == (True,) * 3 and spec.inhomogeneous == (1,)
    assert torch.equal(torch.tensor(spec.weight), task.codec.weight)
    model = LatentOperator(BodyConfig(dim=8, depth=1, heads=2, modes=2), [spec])
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 4
    z, one = torch.randn(1, *spec.tokens[1:], spec.width), torch.ones(1)

    def step(z):
        return model(z.flatten(1, 2), one, one[:, None]).unflatten(1, spec.tokens[1:])

    assert torch.allclose(step(z.roll(1, 2)), step(z).roll(1, 2), atol=1e-5)     # along x
    assert not torch.allclose(step(z.roll(1, 1)), step(z).roll(1, 1), atol=1e-2)  # along y
