"""Ranks that cannot agree any more: one sleeps for ever, or fails inside FSDP2's collectives."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy
from launching import SECONDS
from watching import begin, ending, one_order, play, ranks, saved

from ups.train.ranks import Agreement

SILENT = {
    "ddp": {"sleep": True, "rank": 0, "step": 5},
    "fsdp": {"sleep": True, "rank": 1, "step": 5},
    "gone": {"kill": "SIGSTOP", "rank": 0, "step": 6, "point": "half"},
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """All begin at once, for they mostly wait: {name: (folder, launch)}."""
    folder, begun = tmp_path_factory.mktemp("silent"), {}
    for name, spec in SILENT.items():
        how = {"env": {"SHARDED": "1"}, "config": "2gpu_fsdp.yaml"} if name == "fsdp" else {}
        launch = begin(folder / name, [{"name": "run", **spec}], "--timeout", 6, **how)
        begun[name] = folder / name / "run", launch
    yield begun
    for _, launch in begun.values():
        for pid in launch.left():
            os.kill(pid, signal.SIGKILL)


def assert_named(folder, launch, step, rank):
    named = f"rank {rank} does not answer after 10 s; run the same command again."
    end = ending(folder)
    assert (end["status"], end["step"]) == ("failed", step) and saved(folder) == [3]
    assert end["reason"] == f"rank {1 - rank}: {named}"
    assert launch.stderr.splitlines().count(f"error: {named}") == 1
    assert one_order(folder, cut=True)


def test_a_machine_that_is_gone_is_named(launches):
    """Nothing on it answers: neither rank 0, which saves, nor the launcher, which has the store."""
    folder, launch = launches["gone"]
    first = int(launch.wait_for(folder / "pid0"))
    limit = time.monotonic() + SECONDS
    while Path(f"/proc/{first}/stat").read_text().split()[2] != "T":
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(launch.pid, signal.SIGSTOP)
    launch.wait_for(folder / "toy" / "exit.json")
    os.kill(launch.pid, signal.SIGKILL)
    launch.end(alone=False)
    assert_named(folder, launch, 6, 0)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_rank_that_stops_answering_is_named(launches, name):
    folder, launch = launches[name]
    assert launch.end().returncode != 0
    assert_named(folder, launch, 5, SILENT[name]["rank"])


LONG = range(1, 2000)
TIMES = {  # what goes on for so long: our waits, even while we do not wait, and what rank 0 says
    "a validation of half an hour": ([(6, f"6 {t}") for t in LONG], False),
    "we wait for a network that is slow": ([(7, f"7 {t}") for t in LONG], False),
    "it has come, and works": ([(7, f"8 {t}") for t in LONG], False),
    "it has ended": ([(7, "over")] * 2000, False),
    "nothing is heard, but we train": ([(t, "5 5") for t in LONG], False),
    "nothing is heard now and then": ([(7, f"7 {t // 15}") for t in LONG], False),
    "it is slow in every step": ([(6 + t // 15, f"{5 + t // 15} {t}") for t in LONG], False),
    "it stands still": ([(6, "6 5")] * 30, True),
    "it never says a word": ([(0, "0")] * 30, True),
    "it does not come": ([(7, f"6 {t}") for t in LONG], True),
}


@pytest.mark.parametrize("name", TIMES)
def test_who_is_named_and_who_is_not(name):
    """No second passes for who stands still himself, whatever the clock says afterwards."""
    seconds, silent = TIMES[name]
    alone = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    agree, heard, told, script = Agreement(alone, 20), {0: b"0"}, [], iter(seconds)

    def wait(seconds):
        agree.waits, word = next(script, (0, None))
        heard[0] = word and word.encode()
        return word is None

    agree.over = SimpleNamespace(wait=wait)
    agree._count(heard, told.append)
    assert told == ["rank 0 does not answer after 16 s; run the same command again."] * silent


def test_out_of_memory_under_fsdp_fails_at_once_and_a_restart_takes_half(tmp_path):
    spec = {"name": "micro0", "oom": "forward", "rank": 1, "step": 5}
    done = play(tmp_path, [spec], env={"SHARDED": "1"}, config="2gpu_fsdp.yaml")
    assert done.returncode != 0
    end = ending(tmp_path / "micro0")
    assert (end["status"], end["step"], end["micro_batch"]) == ("out_of_memory", 5, 6)
    assert end["reason"].startswith("rank 1: torch.OutOfMemoryError: CUDA out of memory")
    first, second = ranks(tmp_path / "micro0")
    assert second["error"].startswith("OutOfMemoryError") and second["rows"] == [6] * 5
    assert "OutOfMemoryError" not in first["error"]  # it lost its connection
    assert saved(tmp_path / "micro0") == [3]
    toy.main(["--run", str(tmp_path)])  # one process goes on from what two saved
    state = tmp_path / "micro0" / "toy" / "checkpoints" / "step_8" / "state.json"
    assert json.loads(state.read_text())["micro_batch"] == 3
    assert ending(tmp_path / "micro0")["status"] == "done"
