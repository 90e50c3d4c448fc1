"""Start real processes in tests: a script under `accelerate launch`, with a hard time limit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment():
    """One thread per process (two cores are shared), and the project on the path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "WANDB_MODE": "offline"}


def start(script, *args, processes=2, config="2gpu.yaml", launch=(), env=None):
    """A launcher in a process group of its own."""
    head = [sys.executable, "-m", "accelerate.commands.launch"]
    head += ["--config_file", str(ROOT / "accelerate_configs" / config)]
    head += ["--num_processes", str(processes), *launch]
    return subprocess.Popen([*head, str(script), *map(str, args)], text=True, cwd=ROOT,
                            env=environment() | (env or {}), start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def launch(script, *args, timeout=180, **options):
    """Run to the end; a test fails, and leaves no process, when the time limit is reached."""
    process = start(script, *args, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"no end after {timeout} s\n{out[-2000:]}\n{err[-4000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
