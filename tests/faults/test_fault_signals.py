"""One request to stop may come several times; a second Ctrl-C, seconds later, ends at once."""

import os
import signal

import pytest
import toy
from watching import ending, saved

from ups.train import run

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
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
    with pytest.raises(SystemExit, match="143"):
        train(tmp_path, monkeypatch, [number, signal.SIGINT, signal.SIGINT])
    assert ending(tmp_path / "micro0")["status"] == "stopped"
    assert saved(tmp_path / "micro0") == [5, 3]


def test_a_second_control_c_says_what_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "REPEATS", -1)
    text = "stopped at once at step 5; the last checkpoint is step 3"
    with pytest.raises(KeyboardInterrupt, match=text):
        train(tmp_path, monkeypatch, [signal.SIGTERM, signal.SIGINT])
    assert ending(tmp_path / "micro0")["reason"] == text
    assert saved(tmp_path / "micro0") == [3]
