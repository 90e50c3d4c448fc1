"""What the machine has of memory, and what is said when it is too little."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy

import train_operator
from ups import memory
from ups.config import UsageError
from ups.data.make import make
from ups.memory import free_memory, kernel_kills
from ups.train.ranks import Deaths, place
from ups.train.step import is_out_of_memory


def test_what_is_free_is_what_the_machine_or_the_group_says(tmp_path, monkeypatch):
    real = free_memory()
    assert 0 < real < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("900000")
    (tmp_path / "memory.stat").write_text("anon 500000\nfile 400000\n")  # may be given back
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_groups", lambda: [
        (tmp_path, "memory.max", "memory.current", "file")])
    assert free_memory() == 500000
    (tmp_path / "memory.max").write_text("max")
    assert free_memory() > 0.5 * real


def test_too_much_is_refused_with_a_cure(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"a batch of 1200000000 rows needs 3612.0 GiB of this "
                                         r"machine's memory, and [\d.]+ GiB are free; lower "
                                         r"--batch_size\."):
        toy.main(["--run", str(tmp_path / "toy"), "--batch_size", "1200000000"])
    make("burgers1d", out=tmp_path / "data", samples=20, grid=32, frames=3)
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    with pytest.raises(UsageError, match="burgers1d: a trajectory with its roll-out needs 0.0 GiB "
                                         ".*; keep less with --stride_x or --stride_t"):
        train_operator.main(["--run", str(tmp_path / "run"), "--data", str(tmp_path / "data"),
                             "--cache", str(tmp_path / "cache")])
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)  # so that DDP splits the micro-batch on a CPU too


@pytest.mark.parametrize("number, kills, told", [
    (signal.SIGKILL, 0, "rank 1 died by signal 9 (SIGKILL)"),
    (signal.SIGKILL, 1, "rank 1 died by signal 9 (SIGKILL): the kernel killed it because the "
                        "machine ran out of memory"),
    (signal.SIGALRM, 0, "")])  # it has named another one, and ended itself
def test_a_death_is_told_with_its_signal(monkeypatch, number, kills, told):
    """Rank 1 is a child; its status is there before we ask for it, as with a launcher."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    deaths = Deaths([place(), [*place()[:-1], child.pid], ["elsewhere", "", "", 1]])
    assert deaths.story(0.01) == ""
    before = kernel_kills()
    monkeypatch.setattr("ups.train.ranks.kernel_kills", lambda: before + kills)
    os.kill(child.pid, number)
    assert deaths.story(60) == told and deaths.ended.is_set()
    child.wait()
    assert Path("/proc/vmstat").read_text().count("oom_kill ") == 1
