"""`sbatch launch/slurm.sbatch` on a Slurm of three nodes on loopback: `pytest -m slurm`, as root.

A job has two tasks, each a launcher on a node of its own, and waits in step 5 until it is stopped.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import ROOT, environment, launch
from safetensors.torch import load_file
from test_launch import FLAGS, begun, checkout, losses  # noqa: F401

CLUSTER = Path(__file__).with_name("cluster.sh")
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("slurmctld") or not shutil.which("munged"),
    reason="needs root, and slurmctld, slurmd, slurm-client and munge of Debian")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run([CLUSTER, "start", folder], check=True, timeout=60)
    yield {"SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)


@pytest.fixture
def job(checkout, slurm, monkeypatch):  # noqa: F811
    """The number of a job that waits in step 5, and the folder of its stage."""
    for name, value in (environment() | slurm).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WAIT_AT", "5")
    monkeypatch.chdir(checkout)
    stage = begun(checkout)
    Path("launch/slurm.sbatch").symlink_to(ROOT / "launch" / "slurm.sbatch")
    number = run("sbatch", "--parsable", "--gpus-per-node=1", "--cpus-per-task=1", "--time=3",
                 "--signal=B:USR1@60", "launch/slurm.sbatch", "runs/x",
                 "accelerate_configs/2node.yaml", *FLAGS)
    until(lambda: (stage / "waits").exists(), number)
    yield number, stage
    subprocess.run(["scancel", number], timeout=20)
    until(lambda: not run("squeue", "--noheader"), number)
    for node in ("n1", "n2", "n3"):  # refused where a node is fine
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], timeout=20)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True,
                          timeout=60).stdout.strip()


def until(what, number, seconds=300):
    end = time.monotonic() + seconds
    while not what():
        log = Path(f"slurm-{number}.log")
        assert time.monotonic() < end, log.read_text() if log.exists() else run("squeue")
        time.sleep(0.5)


def field(number, name):
    """One of what `scontrol show job` says."""
    text = run("scontrol", "show", "job", number)
    return next(word.removeprefix(f"{name}=") for word in text.split()
                if word.startswith(f"{name}="))


def nodes(number):
    return set(run("scontrol", "show", "hostnames", field(number, "NodeList")).split())


def same_as_one_launch(stage):
    """The weights are bit for bit those of two processes that nobody disturbed."""
    os.environ.pop("WAIT_AT")
    one = launch(Path("train_operator.py").absolute(), "--run", Path("one").absolute(), *FLAGS)
    assert one.returncode == 0, one.stderr
    expected, got = (load_file(folder / "model" / "model.safetensors")
                     for folder in (Path("one/operator"), stage))
    assert expected.keys() == got.keys() and len(got) > 5
    assert all(torch.equal(expected[name], got[name]) for name in got)
    assert losses(stage) == losses(Path("one/operator"))


def test_the_time_is_up_on_a_drained_node_and_the_job_goes_on_elsewhere(job):
    number, stage = job
    run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    until(lambda: field(number, "Restarts") == "1", number)  # 60 s before the limit, or earlier
    log = Path(f"slurm-{number}.log")
    assert "stopped by a signal at step 6" in log.read_text()
    until(lambda: field(number, "JobState") == "COMPLETED", number)
    assert nodes(number) == {"n2", "n3"}
    assert "resuming from runs/x/operator/checkpoints/step_6" in log.read_text()
    assert json.loads((stage / "exit.json").read_text())["status"] == "done"
    same_as_one_launch(stage)


def test_a_job_that_is_cancelled_has_its_checkpoint(job):
    number, stage = job
    run("scancel", number)
    until(lambda: (stage / "exit.json").exists(), number)
    end = json.loads((stage / "exit.json").read_text())
    assert end["status"] == "stopped" and (stage / "checkpoints" / f"step_{end['step']}").exists()
    until(lambda: field(number, "JobState") == "CANCELLED", number)


def test_a_node_that_fails_and_the_job_goes_on_elsewhere(job):
    number, stage = job
    run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    until(lambda: field(number, "JobState") == "COMPLETED", number)
    assert field(number, "Restarts") == "1" and nodes(number) == {"n1", "n3"}
    assert "resuming from" in Path(f"slurm-{number}.log").read_text()
    same_as_one_launch(stage)
