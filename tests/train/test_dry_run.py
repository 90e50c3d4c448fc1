"""A dry run says what a run needs and leaves nothing behind."""

import fcntl
import os
import re
import shutil
import signal
from types import SimpleNamespace

import h5py
import pytest
import torch
from launching import ROOT, launch

import train_operator as script
from ups.config import command
from ups.data.make import make
from ups.train import dry_run as module
from ups.train.ema import EMA

G = 10**9
TINY = ["--steps", "12", "--batch_size", "8", "--eval_every", "6", "--save_every",
        "6", "--warmup", "4", "--model.dim", "16", "--model.depth", "2", "--model.modes", "4",
        "--val_trajectories", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make("burgers1d", out=folder, samples=40, grid=32, frames=9)
    return folder


def flags(folder, data, *more):
    return ["--run", str(folder / "run"), "--data", str(data), "--tasks", "burgers1d",
            "--cache", str(folder / "cache"),
            *TINY, *map(str, more)]


def predicted(*given):
    """{GPUs: numbers of its line}"""
    lines = [line.replace("%", "").split() for line in module.table(*given).splitlines()[1:]]
    return {int(line[0]): [float(cell) for cell in line[1:]] for line in lines}


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def dry_run(*args):
    """In this process: the exit code."""
    with pytest.raises(SystemExit) as end:
        command(lambda: script.main([*args, "--dry_run"]))
    return end.value.code


def test_two_processes_beside_a_finished_run_that_is_locked(tmp_path, data):
    script.main(flags(tmp_path, data))
    before = content(tmp_path)
    with open(tmp_path / "run" / "operator" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = launch(ROOT / "train_operator.py", *flags(tmp_path, data), "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "all is well." in done.stderr and "is finished" not in done.stdout
    assert content(tmp_path) == before and not list(tmp_path.rglob("*dry_run*"))
    table = done.stdout[done.stdout.index("dry run of operator: 2 processes, cpu"):]
    assert len(re.findall(r"rank [01] 0\.[1-9]\d GiB", table)) == 2
    assert float(re.search(r"seconds per step +([\d.]+)\n", table)[1]) > 0
    assert "4 rows fit, of 4 per process" in table
    checkpoint = tmp_path / "run" / "operator" / "checkpoints" / "step_12"
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    shown = float(re.search(r"checkpoint +([\d.]+) MiB, 2 kept", table)[1])
    assert shown == pytest.approx(size / 2**20, abs=0.06) and shown > 0.1


def test_a_disk_that_is_full_or_too_small(tmp_path, data, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ups.train.run.write_checkpoint", full)
        assert dry_run(*flags(tmp_path, data)) == 1
    shown = capsys.readouterr()
    assert "error: the checkpoint cannot be written" in shown.err and "all is well" not in shown.err
    small = SimpleNamespace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: small)
    assert dry_run(*flags(tmp_path, data)) == 1
    assert "0.0 GiB are free: lower --keep, or put --run" in capsys.readouterr().err


def test_a_step_takes_the_mean_of_a_round_of_tasks():
    """Two tasks in turns, of 1 and 3 s; the first of each compiles, the last step evaluates."""
    times = torch.tensor([0, 50, 80, 1, 3, 1.5, 3.5, 1, 90]).cumsum(0).tolist()
    assert module.step_seconds(times, 2) == 2.0 and module.step_seconds(times, 1) == 1.0
    for graphs, expected in ((False, [8, 9, 11, 23]), (True, [8, 17, 21, 45])):
        found = [module.length(SimpleNamespace(sampler=SimpleNamespace(sizes=n * [9]),
                                               graphs=graphs)) for n in (1, 4, 5, 11)]
        assert found == expected


def test_failing_data_is_one_sentence_and_leaves_nothing(tmp_path, data, capsys):
    shutil.copytree(data, tmp_path / "data")
    with h5py.File(next((tmp_path / "data").iterdir()), "r+") as file:
        file["u"][20, 3, 5] = float("nan")
    before = content(tmp_path)
    assert dry_run(*flags(tmp_path, tmp_path / "data")) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "h5: NaN or Inf in sample 20, " in lines[-1]
    assert content(tmp_path) == before and not (tmp_path / "run").exists()
    assert dry_run(*flags(tmp_path, tmp_path / "none"), "--tasks", "diffsorp1d") == 2


def test_out_of_memory_is_one_sentence_and_leaves_nothing(tmp_path, data, capsys, monkeypatch):
    def greedy(model, batch, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(script, "operator_loss", greedy)
    assert dry_run(*flags(tmp_path, data)) == 1
    shown = capsys.readouterr().err
    assert "error: rank 0 is out of memory at 1 rows: a smaller model or batch will fit." in shown
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["codec"]


def test_a_signal_ends_it_with_a_sentence(tmp_path, data, capsys, monkeypatch):
    real = script.operator_loss

    def stopped(model, batch, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(model, batch, **options)

    monkeypatch.setattr(script, "operator_loss", stopped)
    assert dry_run(*flags(tmp_path, data)) == 143
    assert "stopped by a signal at step 5;" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["codec"]


def test_what_a_killed_one_left_does_not_matter_and_the_codec_stays(tmp_path, data, capsys):
    left = tmp_path / "run" / "operator.dry_run"
    (left / "checkpoints" / "step_99").mkdir(parents=True)
    (left / "config.json").write_text('{"lr": 7.0}')
    (left / "exit.json").write_text('{"status": "out_of_memory", "micro_batch": 2}')
    assert dry_run(*flags(tmp_path, data, "--steps", 3)) == 0  # fewer than it would take
    shown = capsys.readouterr().out
    assert "for 3 steps" in shown and "val/" not in shown  # the last steps of none before
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["codec"]
    assert (tmp_path / "run/codec/burgers1d/model/model.safetensors").stat().st_size > 0


def test_one_rank_out_of_memory_ends_a_dry_run_of_two(tmp_path):
    """Its own sentence, no folder left, and the other rank does not wait for it."""
    script = tmp_path / "greedy.py"
    script.write_text("""
import os, sys, torch, toy
real = toy.loss
def loss(model, batch):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory")
    return real(model, batch)
toy.loss = loss
toy.command(toy.main)
""")
    done = launch(script, "--run", tmp_path / "run", "--dry_run")
    assert done.returncode == 1
    assert "error: rank 1 is out of memory at 1 rows" in done.stderr
    assert not list((tmp_path / "run").rglob("*"))


def test_communication_is_what_crosses_the_slowest_link():
    for gpus, passes, inside, seconds in (
            (1, 2, 100e9, 0), (2, 2, 100e9, 2 * (4 * 0.5 / 100 + 20e-6)),
            (8, 3, 100e9, 3 * (4 * 7 / 8 / 100 + 60e-6)),
            (512, 2, 100e9, 2 * (4 * 511 / 512 / 40 + 180e-6)),
            (512, 2, 1e9, 2 * (4 * 511 / 512 + 180e-6))):
        assert module.communication(gpus, G, passes, inside) == pytest.approx(seconds)


def test_a_prediction_goes_through_what_was_measured():
    gib, sent = 2**30, 0.04004
    ddp = predicted(0.5, 30 * gib, G, 24 * gib, 24 * gib, 100e9, 2, "DDP")
    assert ddp[2] == [0.5, 30.0, 8.0, pytest.approx(0.5 + sent / 2, abs=1e-4), 18.0, 11.5]
    assert ddp[1] == [pytest.approx(0.46, abs=1e-4), 30.0, 0.0] * 2
    assert ddp[512][1] == 30.0 and ddp[512][4] == pytest.approx(6.05, abs=0.01)
    assert ddp == predicted(0.5 + sent / 2, 18 * gib, G, 24 * gib, 12 * gib, 100e9, 2, "FSDP2")


def test_sizes_count_weights_gradients_averages_and_moments():
    model = torch.nn.Linear(9, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(9)).sum().backward()
    optimizer.step()
    run = SimpleNamespace(parts={"model": model, "optimizer": optimizer, "ema": EMA(model, 0.9)})
    assert module.sizes(run) == (100, 2408, 2408)  # 6 x 400 and two counters
