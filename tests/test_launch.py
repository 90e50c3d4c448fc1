"""`launch/pipeline.sh` with a stage in miniature: the end, a signal, a failure, two machines."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy
import yaml
from launching import ROOT, SECONDS, environment, launch

from launch import check_machine

STAGE = """
import os, sys, time
sys.path.append("{tests}")
import toy
from ups.config import command, parse
from ups.train.run import Run

WAIT_AT = 0 if "SLURM_RESTART_COUNT" in os.environ else int(os.environ.get("WAIT_AT", 0))

def main():
    cfg = parse(toy.Config)
    with Run(cfg, "operator") as run:
        every = run.every

        def wait(steps):
            while run.step == WAIT_AT and not run.stop_requested and not cfg.dry_run:
                (run.folder / "waits").write_text("for a signal")
                time.sleep(0.05)
            return every(steps)

        run.every = wait
        if not run.finished:
            toy.train(run, cfg)

command(main)
"""
FLAGS = ["--steps", "12", "--cache", "cache"]  # a dry run takes steps 5 to 12
# `accelerate launch --config_file X`: in a few seconds less where one process needs no launcher
SHIM = """#!/bin/sh
case "$*" in
    *check_machine*) exec python -m launch.check_machine ;;
esac
[ -z "$ALONE" ] || { shift 3; exec python "$@"; }
exec ACCELERATE "$@"
"""


@pytest.fixture
def checkout(tmp_path):
    """The project with a miniature of the operator's stage and a check that takes no time."""
    folder = tmp_path / "checkout"
    (folder / "ups").mkdir(parents=True)
    begins = (ROOT / "ups" / "__init__.py").read_text()
    (folder / "ups" / "__init__.py").write_text(
        f"{begins}\n__path__.append({str(ROOT / 'ups')!r})")
    (folder / "launch").mkdir()
    (folder / "launch" / "check_machine.py").write_text(
        "import os, sys; print('checked'); sys.exit(int(os.environ.get('ILL', 0)))")
    (folder / "launch" / "pipeline.sh").symlink_to(ROOT / "launch" / "pipeline.sh")
    stage = STAGE.format(tests=ROOT / "tests" / "train")
    (folder / "train_operator.py").write_text(stage)
    (folder / "bin").mkdir()
    shim = SHIM.replace("ACCELERATE", str(Path(sys.executable).with_name("accelerate")))
    (folder / "bin" / "accelerate").write_text(shim)
    (folder / "bin" / "accelerate").chmod(0o755)
    (folder / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    return folder


def pipeline(checkout, *args, config="1gpu.yaml", **env):
    """Start it, in a session of its own."""
    path = f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = environment() | {"PYTHONPATH": "", "PATH": path} | env
    return subprocess.Popen(
        ["launch/pipeline.sh", "runs/x", f"accelerate_configs/{config}", *FLAGS, *args],
        cwd=checkout, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True)


def ended(process):
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends the launcher, whose session is another one
        out, err = process.communicate(timeout=SECONDS)
        raise AssertionError(f"it hangs\n{out[-3000:]}\n{err[-3000:]}") from None
    return process.returncode, out, err


def waited_for(path, process):
    limit = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < limit and process.poll() is None, ended(process)
        time.sleep(0.05)


def begun(checkout):
    """As a stage that has begun to train: its dry run is over."""
    stage = checkout / "runs" / "x" / "operator"
    (stage / "checkpoints").mkdir(parents=True)
    return stage


def losses(stage):
    lines = map(json.loads, (stage / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["train/loss"]) for line in lines]


def test_a_signal_then_the_same_command_and_the_stages_after_it(checkout):
    stage = begun(checkout)
    for script in ("train_diffusion.py", "evaluate.py"):
        (checkout / script).write_text("import sys; print(*sys.argv)")
    first = pipeline(checkout, WAIT_AT="5")
    waited_for(stage / "waits", first)
    os.kill(first.pid, signal.SIGUSR1)  # as Slurm does before the end
    code, out, err = ended(first)
    assert code == 143, err
    assert out.count("check_machine") == out.count("checked") == 1
    end = json.loads((stage / "exit.json").read_text())
    assert end["status"] == "stopped" and end["step"] == 6
    code, out, err = ended(pipeline(checkout, "--data", "one", "two", "--micro_batch", "3",
                                       ALONE="1"))
    assert code == 0, err
    assert f"resuming from runs/x/operator/checkpoints/step_{end['step']}" in out
    operator, later = out.split("==> accelerate", 3)[2:]
    assert "--dry_run" not in operator
    assert [step for step, _ in losses(stage)] == list(range(1, 13))
    words = "train_diffusion.py --run runs/x --cache cache --data one two\n"
    assert words in later  # no steps, no micro-batch
    assert out.splitlines()[-1] == "evaluate.py --run runs/x"


def test_it_stops_at_the_first_failure_and_restarts_only_what_died(checkout):
    code, out, _ = ended(pipeline(checkout, ALONE="1", ILL="3"))
    assert code == 3 and "train_operator" not in out
    (checkout / "a.npz").write_text("no arrays")
    code, out, err = ended(pipeline(checkout, "--data", "a.npz", "--axes", "time x", ALONE="1"))
    assert code == 1 and "a.npz" in out + err and "train_operator" not in out
    assert "validate a.npz --axes time x" in out
    code, out, err = ended(pipeline(checkout, "--bach_size", "12", ALONE="1"))
    assert code == 2 and "the nearest is --batch_size" in err and "restart" not in err
    assert out.splitlines()[-1].endswith("--dry_run")  # it did not come to more
    begun(checkout)
    code, out, err = ended(pipeline(checkout, ALONE="1", DIE_AT="4", RESTARTS="1"))
    assert code == 137 and err.count("==> restart") == 1  # it died at both attempts
    assert out.count("resuming from") == 1


def test_two_machines_one_is_lost_comes_back_and_is_lost_for_good(checkout):
    """The survivor begins again with the other; alone, it does what two processes would have."""
    stage = begun(checkout)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def machine(rank, **env):
        return pipeline(checkout, config="2node.yaml", MACHINES="2", MACHINE_RANK=rank,
                        PROCESSES="2", MAIN_IP="127.0.0.1", MAIN_PORT=port, **env)

    survivor = machine("0")
    for step in ("4", "8"):
        code, _, err = ended(machine("1", DIE_AT=step, RESTARTS="0"))
        assert code == 1, err
    waited_for(stage / "exit.json", survivor)
    survivor.terminate()  # it would wait for the other
    _, out, err = ended(survivor)
    assert "==> restart 1" in err and "restart 3" not in err
    assert "resuming from runs/x/operator/checkpoints/step_3" in out
    code, out, err = ended(pipeline(checkout, ALONE="1"))
    assert code == 0 and "resuming from runs/x/operator/checkpoints/step_6" in out, err
    assert json.loads((stage / "exit.json").read_text())["status"] == "done"

    toy.main(["--run", str(checkout / "one"), *FLAGS])
    expected, got = losses(checkout / "one/micro0/toy"), losses(stage)
    assert [step for step, _ in got] == list(range(1, 13))
    assert max(abs(a - b) for (_, a), (_, b) in zip(expected, got, strict=True)) < 1e-9


def test_two_processes_check_the_machine(tmp_path):
    script = tmp_path / "quick.py"  # a first compilation takes half a minute
    script.write_text("import sys, torch\nfrom launch import check_machine\n"
                      "torch._dynamo.config.disable = True\nsys.exit(check_machine.main())")
    done = launch(script)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert [name for _, name, _ in lines] == ["versions", "devices", "all_reduce", "bf16",
                                              "compiler", "files"]  # each once, from one process
    assert ["pass", "all_reduce", "2 processes agree"] in lines


def test_one_check_that_fails_is_the_exit_code(monkeypatch, capfd):
    monkeypatch.setattr(check_machine, "CHECKS", (check_machine.versions, check_machine.files))
    monkeypatch.setattr(check_machine.resource, "getrlimit", lambda _: (512, 4096))
    assert check_machine.main() == 1
    assert "fail  files          512 may be open at once, 1024" in capfd.readouterr().out


def test_every_config_on_one_machine_takes_a_free_port():
    files = (ROOT / "accelerate_configs").glob("*.yaml")
    configs = {file.name: yaml.safe_load(file.read_text()) for file in files}
    many = {name for name, c in configs.items() if c["num_processes"] > 1 == c["num_machines"]}
    assert {"2gpu.yaml", "2gpu_fsdp.yaml", "8gpu.yaml"} <= many
    assert {configs[name]["main_process_port"] for name in many} == {0}


def test_a_rented_machine_stops_by_itself():
    """tests/slurm runs the other scheduler's script."""
    sky = yaml.safe_load((ROOT / "launch" / "sky.yaml").read_text())
    assert sky["resources"]["autostop"]["idle_minutes"] <= 10
    assert "launch/pipeline.sh" in sky["run"]
