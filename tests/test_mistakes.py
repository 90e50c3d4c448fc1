"""Mistakes and hostile places: each ends in one sentence with its cure, or simply works."""

import locale
import os
import subprocess
import sys
import types

import matplotlib
import pytest
import torch
import toy
from accelerate import Accelerator
from launching import ROOT, SECONDS, environment

import train_operator
from ups import files
from ups.config import UsageError, command
from ups.data.make import make
from ups.files import lock_folder
from ups.latents import open_tasks
from ups.simulator import Simulator
from ups.stages import load_codec
from ups.train import ranks


@pytest.fixture
def run(tmp_path):
    """A run that is done."""
    toy.main(["--run", str(tmp_path / "run")])
    return tmp_path / "run"


def test_more_steps_for_a_finished_run(run):
    """The learning rate has ended with its steps, so the cure is another run from its weights."""
    with pytest.raises(UsageError, match=rf"steps \(8 -> 9\)\. Its learning rate ended .* give "
                                         rf"another --run and --init {run / 'micro0'}\."):
        toy.main(["--run", str(run), "--steps", "9"])
    with pytest.raises(UsageError, match=r"steps \(8 -> 7\)\. Use the old values"):
        toy.main(["--run", str(run), "--steps", "7"])


@pytest.mark.parametrize("name, text", [
    ("exit.json", "[]"), ("exit.json", "7"), ("exit.json", '{"status": "done", "step": [1]}'),
    ("exit.json", '{"status": "out_of_memory", "micro_batch": "8"}'), ("choices.json", "[1]"),
    ("choices.json", '{"a": 5}'), ("choices.json", '{"a": {"plans": 5}}'),
    ("choices.json", '{"a": {"plans": {"1": 0.1}}}'), ("choices.json", '{"a": {"strength": "x"}}'),
    ("config.json", '{"strides": 2}')])
def test_a_file_of_a_run_that_holds_another_kind_of_value(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=rf"{name} is damaged; put a sound copy back, or"):
        files.read_json(tmp_path / name)


def test_a_moved_run_goes_on_and_so_does_one_whose_clock_went_back(run, capsys):
    (run / "micro0/toy/exit.json").unlink()
    for time, name in ((3e9, "step_6"), (1e9, "step_8")):
        os.utime(run / "micro0/toy/checkpoints" / name, (time, time))
    run.rename(run.with_name("moved"))
    toy.main(["--run", str(run.with_name("moved"))])
    assert f"resuming from {run.with_name('moved')}/micro0/toy/checkpoints/step_8" in (
        capsys.readouterr().out)


def test_a_second_launch_in_the_same_folder(run):
    (run / "micro0/toy/exit.json").unlink()
    with lock_folder(run / "micro0" / "toy", "--run"):
        with pytest.raises(UsageError, match="toy is in use by another launch; wait for it, stop "
                                             "it, or give this one another --run"):
            toy.main(["--run", str(run)])


def test_a_cache_of_another_user(tmp_path, monkeypatch):
    """One that is there is read (tests/cache); one in a folder of his cannot be built."""
    def refused(path, mode):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(files, "open", refused, raising=False)
    with pytest.raises(UsageError, match=r"cannot be written \(Permission denied\); give another "
                                         "--cache"):
        files.lock(tmp_path / "burgers1d-train-1.lock", "--cache")


def test_a_locale_without_utf_8(monkeypatch, capsys):
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: "ISO-8859-1")
    with pytest.raises(SystemExit, match="2"):
        command(lambda: 0)
    assert capsys.readouterr().err == ("error: files and names would be read as iso-8859-1; "
                                       "`export PYTHONUTF8=1`, then run again.\n")


def test_the_gpu_of_a_mac(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda: types.SimpleNamespace(type="mps"))
    assert ranks.make_accelerator().device.type == "cpu"
    assert "this Mac's GPU has no float64; using the CPU." in capsys.readouterr().err


def test_a_model_of_the_hub_is_no_folder():
    with pytest.raises(UsageError, match="someone/burgers: there is no such folder; give a run"):
        Simulator.load("someone/burgers")


def test_spaces_umlauts_no_home_no_locale_no_network(tmp_path):
    """The main script, whole, in the C locale, where nothing may be written at home."""
    place = tmp_path / "Läufe über Nacht"
    make("burgers1d", out=place / "data", samples=40, grid=32, frames=5)
    env = environment() | {"HOME": "/proc/none", "LC_ALL": "C", "HF_HUB_OFFLINE": "1",
                           "MPLCONFIGDIR": matplotlib.get_cachedir()}  # its fonts take seconds
    env = {name: value for name, value in env.items() if not name.startswith(("XDG", "LANG"))}
    done = subprocess.run(
        [sys.executable, ROOT / "train_operator.py", "--run", "runs/größer ist besser", "--data",
         "data", "--steps", "4", "--batch_size", "4", "--model.dim", "8", "--model.depth", "1",
         "--model.modes", "4", "--val_trajectories", "2"],
        cwd=place, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    folder = place / "runs/größer ist besser/operator"
    assert {"test.json", "exit.json", "rollout.png"} <= {path.name for path in folder.iterdir()}


def test_a_codec_is_fitted_once_and_its_latents_are_those_of_every_stage(tmp_path):
    make("burgers1d", out=tmp_path / "data", samples=40, grid=32, frames=5)
    cfg = train_operator.Config(run=str(tmp_path / "run"), data=(str(tmp_path / "data"),),
                                cache=str(tmp_path / "cache"))
    first, second = (open_tasks(Accelerator(cpu=True), cfg, "train")[0] for _ in range(2))
    codec, mark = load_codec(tmp_path / "run", "burgers1d")
    assert first.fingerprint == second.fingerprint == mark
    u = first.fields.read(first.fields.split("train")[:3]).flatten(0, 1)
    assert torch.equal(codec.encode(u), second.cache.z[0][:3].flatten(0, 1))
