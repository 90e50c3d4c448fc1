"""The doctor as launched: one line per check, one exit code on all ranks, no waiting."""

import re
import subprocess
import sys

import pytest
from launching import ROOT, environment, launch

from ups import doctor

QUICK = {"CXX": "/no/compiler", "WANDB_MODE": "offline"}  # a first compilation takes half a minute


def lines(text):
    return {match[2]: (match[1], match[3]) for match in
            re.finditer(r"^(pass|warn|fail)  (.{14}) (.*)$", text, re.MULTILINE)}


def test_two_processes_reduce_and_are_named():
    done = launch("ups.doctor", launch=["--module"], env=QUICK)
    assert done.returncode == 0, done.stderr
    table = {name.strip(): line for name, line in lines(done.stdout).items()}
    assert list(table) == list(doctor.CHECKS)  # each once, from one process, in order
    speeds = re.findall(r"rank ([01]) of 2 on \S+ cpu\S*, gloo: ([\d.]+) GB/s",
                        table["all-reduce"][1])
    assert [rank for rank, _ in speeds] == ["0", "1"]
    assert all(0.001 < float(speed) < 1000 for _, speed in speeds)
    assert table["compile"][0] == "warn" and "/no/compiler" in table["compile"][1]  # not a failure
    assert 1e-4 < float(re.search(r"right to (\S+)", table["bf16"][1])[1]) < 1e-2


def test_without_a_launcher_a_failure_is_exit_code_1():
    done = subprocess.run(["bash", "-c", f"ulimit -n 512; exec {sys.executable} -m ups.doctor"],
                          capture_output=True, text=True, cwd=ROOT, timeout=120,
                          env=environment() | {
                              "TORCHDYNAMO_DISABLE": "1", "WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"})
    assert done.returncode == 1, done.stderr
    assert "fail  open files     512 may be open at once, 1024 are wanted" in done.stdout
    assert re.search(r"warn  W&B +127.0.0.1 is not reachable \(.*refused\)", done.stdout)
    assert done.stdout.count("fail") == 1 and len(done.stdout.splitlines()) == len(doctor.CHECKS)


def test_a_check_that_hangs_is_named():
    code = ("import time; from ups import doctor; doctor.LIMIT = 1\n"
            "def patience(accelerator): time.sleep(60)\n"
            "doctor.CHECKS = {'patience': patience}; doctor.main([])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          timeout=60, env=environment())
    assert done.returncode == 1 and "in patience" in done.stderr


@pytest.mark.parametrize("name, outcomes, expected", [
    ("disk", [("pass", "9 GiB"), ("pass", "9 GiB")], ("pass", "9 GiB")),
    ("disk", [("pass", "9 GiB"), ("warn", "2 GiB")], ("warn", "rank 0: 9 GiB; rank 1: 2 GiB")),
    ("W&B", [("warn", "no answer"), ("pass", "")], ("warn", "no answer")),
    ("all-reduce", [("pass", "rank 0 a"), ("fail", "rank 1 b")], ("fail", "rank 0 a, rank 1 b")),
    ("versions", [("pass", "torch 1"), ("pass", "torch 2")],
     ("fail", "rank 0: torch 1; rank 1: torch 2")),
])
def test_the_worst_rank_decides(name, outcomes, expected):
    assert doctor.merged(name, outcomes) == expected


def test_what_raises_is_a_failure_and_the_next_check_is_tried(monkeypatch):
    def broken(accelerator):
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(doctor, "CHECKS", {"one": broken, "two": lambda accelerator: ("pass", "")})
    assert doctor.examine(None) == [("fail", "ValueError: first line"), ("pass", "")]
