"""Start real processes in tests: a script under `accelerate launch`, with a hard time limit.

An interpreter takes seconds to load torch. So launchers and their ranks are forks of one process
that has loaded it. With `fresh` they are new interpreters, as a user starts them.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SECONDS = 600  # then it hangs, however loaded the machine is
THREADS = ThreadPoolExecutor(32)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    "accelerate.commands.launch", "torch.distributed.run", "torch.distributed.fsdp",
    "torch._dynamo", "h5py", "yaml", "safetensors.torch", "tqdm", "matplotlib.pyplot"])


def environment():
    """One thread per process (two cores are shared), and the project on the path."""
    path = os.pathsep.join(map(str, (ROOT, TESTS, TESTS / "train", TESTS / "faults")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "WANDB_MODE": "offline"}


class Launch:
    """`python COMMAND` in a session of its own, and all that it starts."""

    def __init__(self, command, env=None, fresh=False):
        self.began, self.mark = time.monotonic(), uuid.uuid4().hex
        read, write = zip(*(FORKS.Pipe(duplex=False) for _ in range(2)), strict=True)
        self.output = os.readlink(f"/proc/self/fd/{write[1].fileno()}")
        env = environment() | {"UPS_TEST_MARK": self.mark} | (env or {})
        command = list(map(str, command))
        if fresh:
            out, err = (pipe.fileno() for pipe in write)
            self.process = subprocess.Popen([sys.executable, *command], stdout=out, stderr=err,
                                            env=env, cwd=ROOT, start_new_session=True)
        else:
            self.process = FORKS.Process(target=forked, args=(command, env, write))
            self.process.start()
        for pipe in write:
            pipe.close()
        self.said = [THREADS.submit(open(os.dup(pipe.fileno())).read) for pipe in read]
        self.pid = self.process.pid

    @property
    def returncode(self):
        """None, while it runs."""
        fresh = isinstance(self.process, subprocess.Popen)
        return self.process.poll() if fresh else self.process.exitcode

    def wait_for(self, path):
        """Wait until the processes have written a file; return its text."""
        limit = time.monotonic() + SECONDS
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < limit and self.returncode is None, f"no {path}"
            time.sleep(0.02)
        return path.read_text()

    def left(self):
        """Its processes, zombies apart: known by their environment, or, of forks, their output."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (self.mark.encode() in (folder / "environ").read_bytes()
                        or os.readlink(folder / "fd/2") == self.output):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes()[:200]
            except OSError:  # it ended, or is not ours
                continue
        return found

    def end(self, seconds=SECONDS, linger=120, alone=True):
        """Wait for the launcher, and for every process that it started: none may stay."""
        limit = self.began + seconds
        while self.returncode is None and time.monotonic() < limit:
            time.sleep(0.02)
        ended, limit = self.returncode is not None, time.monotonic() + linger
        while (left := self.left()) and ended and alone and time.monotonic() < limit:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.stdout, self.stderr = (said.result(60) for said in self.said)
        shown = f"{self.stdout[-2000:]}\n{self.stderr[-4000:]}"
        assert ended, f"no end after {seconds} s\n{shown}"
        assert not (left and alone), f"still there: {left}\n{shown}"
        self.seconds = time.monotonic() - self.began
        return self


def forked(command, env, pipes):
    """In a fork: `python COMMAND`, whose own processes of Python are forks too."""
    os.setsid()
    os.chdir(ROOT)
    multiprocessing.set_start_method("fork", force=True)  # of a loader's workers, as always
    for number, pipe in enumerate(pipes, 1):
        os.dup2(pipe.fileno(), number)
    real = subprocess.Popen._execute_child

    def execute(self, args, *given):
        if args[0] != sys.executable:
            return real(self, args, *given)
        self._child_created, self.pid = True, os.fork()
        if self.pid == 0:
            subprocess.Popen._execute_child = real
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            os.closerange(3, 1024)
            python(args[1:], given[5])

    subprocess.Popen._execute_child = execute
    python(command, env)


def python(command, env):
    """What a new interpreter does; it does not return."""
    os.environ.clear()
    os.environ.update(env)
    command, code = [word for word in command if word != "-u"], 0
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    sys.argv = command[command[0] == "-m":]
    sys.path[:0] = [str(Path(sys.argv[0]).parent), *env["PYTHONPATH"].split(os.pathsep)]
    try:
        if command[0] == "-m":
            sys.exit(importlib.import_module(sys.argv[0]).main())
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        code = 1
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))  # not of here
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(script, *args, processes=2, config="2gpu.yaml", launch=(), **options):
    """`accelerate launch`."""
    return Launch(["-m", "accelerate.commands.launch",
                   "--config_file", ROOT / "accelerate_configs" / config,
                   "--num_processes", processes, *launch, script, *args], **options)


def launch(script, *args, **options):
    """Run to the end; a test fails, and leaves no process, when the time limit is reached."""
    return start(script, *args, **options).end()
