"""How a launch ends: asked once or several times, at once, or without a word."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import toy
from watching import ending, saved

from ups.config import RunError, Stopped, UsageError
from ups.train import run

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.fixture(autouse=True)
def handlers():
    """As in a terminal: what `nohup` and `&` start ignores some of them, and so would a run."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def train(tmp_path, monkeypatch, numbers):
    """Send signals to this process in step 5; the last checkpoint was step 3."""
    steps = iter(range(1, 9))

    def loss(model, batch, real=toy.loss):
        if next(steps) == 5:
            for number in numbers:
                os.kill(os.getpid(), number)
        return real(model, batch)

    monkeypatch.setattr(toy, "loss", loss)
    toy.main(["--run", str(tmp_path)])


@pytest.mark.parametrize("number", SIGNALS)
def test_the_same_request_twice(tmp_path, monkeypatch, number):
    with pytest.raises(Stopped, match="stopped by a signal at step 5; run the same command again"):
        train(tmp_path, monkeypatch, [number, signal.SIGINT, signal.SIGINT])
    assert ending(tmp_path / "micro0")["status"] == "stopped"
    assert saved(tmp_path / "micro0") == [5, 3]


def test_a_request_in_the_last_validation_or_save(tmp_path, monkeypatch):
    def save(self, real=run.Run.save):
        real(self)
        if self.step == self.cfg.steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match="by a signal at step 8; run"):
        patch.setattr(run.Run, "save", save)
        toy.main(["--run", str(tmp_path)])
    assert ending(tmp_path / "micro0")["status"] == "stopped"
    toy.main(["--run", str(tmp_path)])
    assert ending(tmp_path / "micro0")["status"] == "done"


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, signal.SIGINT),
                                           (signal.SIGINT, signal.SIGTERM)])  # by a launcher
def test_a_second_control_c_says_what_is_lost(tmp_path, monkeypatch, first, second):
    """It too comes several times, and some of it while the end is written."""
    def interrupted(path, value, real=run.write_json):
        if path.name == "exit.json":
            monkeypatch.setattr(run, "REPEATS", 60)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
        real(path, value)

    monkeypatch.setattr(run, "REPEATS", -1)
    monkeypatch.setattr(run, "write_json", interrupted)
    text = "stopped at once at step 5; the last checkpoint is step 3"
    with pytest.raises(KeyboardInterrupt, match=text):
        train(tmp_path, monkeypatch, [first, second])
    assert ending(tmp_path / "micro0")["reason"] == text
    assert saved(tmp_path / "micro0") == [3]


def test_a_folder_that_is_removed_meanwhile_is_not_made_again(tmp_path, monkeypatch):
    """Without its codec and its configuration nobody could use what is left."""
    steps = iter(range(1, 9))

    def loss(model, batch, real=toy.loss):
        if next(steps) == 5:
            shutil.rmtree(tmp_path / "micro0")
        return real(model, batch)

    monkeypatch.setattr(toy, "loss", loss)
    with pytest.raises(RunError, match="micro0/toy was removed while it trained; run the same"):
        toy.main(["--run", str(tmp_path)])
    assert not (tmp_path / "micro0").exists()


@pytest.mark.parametrize("kills, status, rows", [(0, "failed", 0), (1, "out_of_memory", 6)])
def test_a_launch_that_died_without_a_word(tmp_path, monkeypatch, capsys, kills, status, rows):
    """As SIGKILL leaves it: no `exit.json`. If the kernel killed since, memory was the cause."""
    monkeypatch.setattr(run, "REPEATS", -1)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, monkeypatch, [signal.SIGTERM, signal.SIGINT])
    folder = tmp_path / "micro0" / "toy"
    (folder / "exit.json").unlink()
    begun = json.loads((folder / ".lock").read_text())
    assert begun["micro_batch"] == 12 and begun["place"][-1] == os.getpid()
    begun["kernel_kills"] -= kills
    (folder / ".lock").write_text(json.dumps(begun))
    with pytest.raises(UsageError, match="another configuration"):
        toy.main(["--run", str(tmp_path), "--lr", "9"])  # another launch does not hide it
    end = ending(tmp_path / "micro0")
    assert (end["status"], end["step"], end["micro_batch"]) == (status, 3, 12)
    monkeypatch.undo()
    toy.main(["--run", str(tmp_path)])
    said = capsys.readouterr()
    assert f"the last launch ended without a word: {end['reason']}." in said.err
    assert "resuming from" in said.out and ending(tmp_path / "micro0")["status"] == "done"
    assert json.loads((folder / "checkpoints/step_8/state.json").read_text())["micro_batch"] == rows


LAUNCHED = os.environ | {"ACCELERATE_MIXED_PRECISION": "no"}


def test_a_process_ends_with_its_launcher_even_before_torch_is_there():
    work = "import ups, time; print(flush=True); time.sleep(60)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE,
                          env=LAUNCHED) as launcher:
        assert launcher.stdout.readline() == b"\n"
        launcher.kill()
        assert select.select([launcher.stdout], [], [], 20)[0]  # nobody can write any more
        assert launcher.stdout.read() == b""


@pytest.mark.skipif("python" in Path("/proc/1/cmdline").read_text(), reason="it may be a launcher")
def test_a_process_whose_launcher_has_gone_does_not_begin():
    orphan = "import os; os.getppid = lambda: 1; import ups"
    alone, rank = (subprocess.run([sys.executable, "-c", orphan], env=env, capture_output=True)
                   for env in (LAUNCHED, LAUNCHED | {"TORCHELASTIC_RUN_ID": "none"}))
    assert alone.returncode == 0  # it waits for nobody
    assert (rank.returncode, rank.stderr) == (
        1, b"error: the launcher has gone; run the same command again.\n")
