"""--minutes: a schedule as long as there is time for, found by a trial that leaves no trace."""

import json
import time

import pytest
import toy
from safetensors.torch import load_file

from ups.config import UsageError
from ups.train import run as module


def train(folder, *flags, monkeypatch, passed=0.0):
    monkeypatch.setattr(module, "BEGAN", time.monotonic() - passed)
    toy.main(["--run", str(folder), "--save_every", "1000", *map(str, flags)])
    stage = folder / "micro0" / "toy"
    assert {path.name for path in stage.iterdir()} == {
        ".lock", "config.json", "metrics.jsonl", "exit.json", "checkpoints", "model"}
    weights = load_file(folder / "micro0" / "rank0.safetensors")
    weights = {key: t.tolist() for key, t in weights.items() if key != "seen"}  # by the trial too
    return weights, (stage / "metrics.jsonl").read_text(), json.loads(
        (stage / "config.json").read_text())["steps"]


def test_a_run_of_minutes_is_one_of_so_many_steps(tmp_path, monkeypatch, capsys):
    train(tmp_path / "first", "--steps", 2, monkeypatch=monkeypatch)  # loads what takes seconds
    began = time.monotonic()
    *result, steps = train(tmp_path / "a", "--minutes", 0.1, monkeypatch=monkeypatch)
    took = time.monotonic() - began
    assert f"--minutes 0.1 leaves time for --steps {steps}." in capsys.readouterr().out
    assert steps > 8 and 2 < took < 12  # 6 s were asked for
    *same, _ = train(tmp_path / "b", "--steps", steps, monkeypatch=monkeypatch)
    assert same == result

    # what has passed before the first step counts; a resume keeps the steps
    stage = tmp_path / "a" / "micro0" / "toy"
    (stage / "exit.json").unlink()
    *resumed, kept = train(tmp_path / "a", "--minutes", 0.1, monkeypatch=monkeypatch, passed=9.0)
    assert kept == steps and resumed[1] == result[1]
    *_, kept = train(tmp_path / "a", "--steps", steps, monkeypatch=monkeypatch)
    assert kept == steps
    with pytest.raises(UsageError, match=r"another configuration: minutes \(0.1 -> 0.2\)\."):
        train(tmp_path / "a", "--minutes", 0.2, monkeypatch=monkeypatch)
    with pytest.raises(UsageError, match="--minutes 0.1: 0.2 have passed before the first step"):
        train(tmp_path / "c", "--minutes", 0.1, monkeypatch=monkeypatch, passed=9.0)
