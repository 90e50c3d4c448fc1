"""Launch faulty.py on two real processes, with a hard time limit, and see that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import launching

SCRIPT = Path(__file__).with_name("faulty.py")
SECONDS = 300  # then it hangs, however loaded the machine is


class Watched:
    """A launch whose processes can be found by a mark in their environment."""

    def __init__(self, folder, specs, *flags, env=None, torchrun=(), **options):
        self.folder, self.mark, self.began = Path(folder), uuid.uuid4().hex, time.monotonic()
        env = {"UPS_TEST_MARK": self.mark} | (env or {})
        command = [str(SCRIPT), json.dumps(specs), "--run", str(folder), *map(str, flags)]
        if torchrun:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *torchrun, "--", *command],
                text=True, cwd=launching.ROOT, env=launching.environment() | env,
                start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        else:
            self.process = launching.start(*command, env=env, **options)

    def wait_for(self, path, seconds=SECONDS):
        """Wait until the processes have written a file; return its text."""
        end = time.monotonic() + seconds
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < end and self.process.poll() is None, f"no {path}"
            time.sleep(0.02)
        return path.read_text()

    def end(self, seconds=SECONDS, linger=20):
        """Wait for the launcher and for every process that it started."""
        try:
            self.out, self.err = self.process.communicate(timeout=seconds)
            self.code = self.process.returncode
            self.seconds = time.monotonic() - self.began
            limit = time.monotonic() + linger
            while (left := marked(self.mark)) and time.monotonic() < limit:
                time.sleep(0.05)
            assert not left, f"still there: {left}\n{self.err[-3000:]}"
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {seconds} s") from None
        finally:
            for pid in marked(self.mark):
                os.kill(pid, signal.SIGKILL)
        return self


def marked(mark):
    """Processes, zombies apart, that have the mark in their environment."""
    found, mark = {}, mark.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes()[:200]
        except OSError:  # it ended, or is not ours
            continue
    return found


def play(folder, specs, *flags, seconds=SECONDS, **options):
    return Watched(folder, specs, *flags, **options).end(seconds)


def ranks(folder):
    """What each rank wrote down at its end; there were two of them."""
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["world"] for one in seen] == [2, 2]
    return seen


def one_order(folder, cut=False):
    """All ranks entered the same collectives; one that died may lack the end of the list."""
    lines = [(folder / f"collectives{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    length = min(map(len, lines))
    assert length and cut or ({len(one) for one in lines} == {length} and length > 8)
    assert all(one[:length] == lines[0][:length] for one in lines)
    return True


def ending(folder):
    path = folder / "toy" / "exit.json"
    return json.loads(path.read_text()) if path.exists() else None


def losses(folder, key="train/loss"):
    lines = map(json.loads, (folder / "toy" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def saved(folder):
    """Steps of the sound checkpoints, newest first."""
    from ups.train.checkpoint import checkpoints, damage, step_of

    return [step_of(c) for c in checkpoints(folder / "toy" / "checkpoints") if damage(c) is None]
