"""--minutes: a schedule as long as there is time for, found by a trial that leaves no trace."""

import itertools
import json
import time

import pytest
import toy
from safetensors.torch import load_file

from ups.config import UsageError
from ups.train import dry_run
from ups.train import run as module


def train(folder, *flags):
    toy.main(["--run", str(folder), "--save_every", "100", *map(str, flags)])
    stage = folder / "micro0" / "toy"
    assert {path.name for path in stage.iterdir()} == {
        ".lock", "config.json", "metrics.jsonl", "exit.json", "checkpoints", "model"}
    weights = load_file(folder / "micro0" / "rank0.safetensors")
    weights = {key: t.tolist() for key, t in weights.items() if key != "seen"}  # by the trial too
    return weights, (stage / "metrics.jsonl").read_text(), json.loads(
        (stage / "config.json").read_text())["steps"]


def test_a_run_of_minutes_is_one_of_so_many_steps(tmp_path, monkeypatch, capsys):
    """A step takes 20 s here, a validation none; of ten hours nine and a half have passed."""
    monkeypatch.setattr(dry_run, "now", itertools.count(0, 20).__next__)
    monkeypatch.setattr(module, "BEGAN", time.monotonic() - 9.5 * 3600)
    *result, steps = train(tmp_path / "a", "--minutes", 600)
    assert 60 < steps <= 90  # less what this test takes
    assert f"--minutes 600 leaves time for --steps {steps}." in capsys.readouterr().out
    *same, _ = train(tmp_path / "b", "--steps", steps)
    assert same == result

    (tmp_path / "a" / "micro0" / "toy" / "exit.json").unlink()
    *resumed, kept = train(tmp_path / "a", "--minutes", 600)  # once and for all
    assert kept == steps and resumed[1] == result[1]
    *_, kept = train(tmp_path / "a", "--steps", steps)
    assert kept == steps
    with pytest.raises(UsageError, match=r"another configuration: minutes \(600.0 -> 601.0\)\."):
        train(tmp_path / "a", "--minutes", 601)
    with pytest.raises(UsageError, match=r"--minutes 500: 57\d\.\d have passed before the first"):
        train(tmp_path / "c", "--minutes", 500)


def test_validation_and_test_have_their_time(tmp_path, monkeypatch):
    """The last step of the trial evaluates; a test takes as long as ten validations."""
    run = toy.Run(toy.Config(run=str(tmp_path), minutes=10, eval_every=10), "toy")
    run.sampler = run  # whose steps are set too
    dry_run.fit_minutes(run, 1.0, 20.0, 80.0)
    assert run.cfg.steps == run.steps == (600 - 80 - 11 * 20) // (1 + 20 / 3)  # saves every 3
    run.__exit__(ValueError, ValueError(), None)
