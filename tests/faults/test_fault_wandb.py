"""Weights & Biases is a copy: one run, the true end, and never in the way of training."""

import time

import pytest
import toy
from launching import Launch
from wandb_file import summary
from watching import ending, losses, play, ranks

from ups.train import tracking

pytest.importorskip("wandb")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Rank 1 fails; the same command goes on and is done; another run is stopped by a signal."""
    folder = tmp_path_factory.mktemp("wandb")
    specs = [{"name": "one", "raises": "ValueError", "rank": 1, "step": 5}, {"name": "one"},
             {"name": "two", "kill": "SIGTERM", "rank": 1, "step": 4}]
    done = play(folder, specs, "--wandb", "faults")
    assert "did not" not in done.stderr, done.stderr[-3000:]
    assert ranks(folder / "one")[0]["error"] is None
    return folder


def test_one_run_per_folder_with_its_true_end(launched):
    failed, done = summary(launched / "one")
    assert failed["exit"] == 1 and done["exit"] == 0
    assert failed["id"] == done["id"] == (launched / "one" / "toy" / "wandb_id").read_text()
    assert failed["steps"] == [1, 2, 3, 4]
    assert done["steps"] == [4, 5, 6, 7, 8]  # from the checkpoint of step 3
    (stopped,) = summary(launched / "two")
    assert stopped["exit"] == 143 and stopped["id"] != done["id"]
    assert ending(launched / "two")["status"] == "stopped"


def test_what_a_run_is_called(launched):
    for one in summary(launched / "one"):
        assert (one["project"], one["name"], one["group"]) == ("faults", "one/toy", "one")
        assert one["tags"] == ["toy"] and {"lr", "batch_size", "seed"} <= one["config"]


FROZEN = """
import psutil, sys
import toy
from ups.train import tracking

def loss(model, batch, real=toy.loss):
    tracking.PATIENCE = 2
    for process in psutil.Process().children(recursive=True):
        process.suspend()
    return real(model, batch)

toy.loss = loss
toy.main(sys.argv[1:])
"""


def test_a_service_that_stands_still_does_not_hold_the_end(tmp_path):
    """W&B's own exit would wait for it for ever."""
    (tmp_path / "frozen.py").write_text(FROZEN)
    done = Launch([tmp_path / "frozen.py", "--run", tmp_path, "--wandb", "faults"], fresh=True)
    done.end(alone=False)  # the service stands still for ever
    assert done.returncode == 0 and ending(tmp_path / "micro0")["status"] == "done"
    assert "W&B did not finish (no answer in 2 s)" in done.stderr


def in_the_way(monkeypatch, tmp_path, capsys, name, call):
    """Train with a W&B whose method `name` is `call`; returns what was said."""
    def quick(self, what, work, real=tracking.WandB._try):
        monkeypatch.setattr(tracking, "PATIENCE", 0.5 if (what, call) == (name, blocks) else 60)
        real(self, what, work)

    monkeypatch.setattr(tracking.WandB, "_try", quick)
    for method in ("start", "log"):
        monkeypatch.setattr(tracking.WandBTracker, method, lambda self, *a, **k: None)
    monkeypatch.setattr(tracking.WandBTracker, name, call)
    toy.main(["--run", str(tmp_path), "--wandb", "faults"])
    assert ending(tmp_path / "micro0")["status"] == "done"
    assert losses(tmp_path / "micro0").keys() == set(range(1, 9))
    return capsys.readouterr().err


def fails(self, *args, **options):
    raise SystemExit("no network")


def blocks(self, *args, **options):
    time.sleep(60)


@pytest.mark.parametrize("name", ["start", "log"])
@pytest.mark.parametrize("call, words", [(fails, "SystemExit: no network"),
                                         (blocks, "no answer in 0.5 s")])
def test_a_tracker_that_fails_or_blocks_is_left_alone(
        monkeypatch, tmp_path, capsys, name, call, words):
    said = in_the_way(monkeypatch, tmp_path, capsys, name, call)
    assert said.count(f"W&B did not {name} ({words}); the run goes on without it") == 1
