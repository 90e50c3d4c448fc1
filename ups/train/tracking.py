"""The record of a run: `metrics.jsonl` always, Weights & Biases beside it when asked for.

`metrics.jsonl` has one JSON object per line, each with its `step`, and is cut back to the
checkpoint's step when a run resumes. W&B is a copy for people to look at: one W&B run per stage
folder, from the main process. When it fails or blocks, it is reported once and left alone.
"""

import contextlib
import json
import os
import secrets
import sys
import threading
from pathlib import Path

from accelerate.tracking import WandBTracker

from ups.files import write_text

PATIENCE = 45  # seconds that training waits for W&B to start or to finish


class Metrics:
    def __init__(self, path):
        self.path, self.waiting = Path(path), ""

    def write(self, step, values):
        """Append a line; while the disk is full, lines wait for the next call."""
        self.waiting += json.dumps({"step": step, **values}) + "\n"
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write(self.waiting)
            self.waiting = ""
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            print(f"{self.path} was not written ({error}); training goes on.", file=sys.stderr)

    def read(self):
        """All whole lines; what a kill or a power cut has left of others is dropped."""
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        found = []
        for line in text.split("\n")[:-1]:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [one for one in found if isinstance(one, dict) and "step" in one]

    def cut(self, step):
        """Forget what was written after `step`."""
        kept = [line for line in self.read() if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))


class WandB:
    """Accelerate's W&B tracker, resumed by the id that is kept in the stage's folder."""

    def __init__(self, project, folder, config, tags):
        self.live, stored = True, folder / "wandb_id"
        if not stored.exists():
            stored.write_text(secrets.token_hex(4))

        def start():
            self.tracker = WandBTracker(
                project, id=stored.read_text(), resume="allow", dir=str(folder), config=config,
                name=f"{folder.parent.name}/{folder.name}", group=folder.parent.name, tags=tags)
            self.tracker.start()

        self._try("start", start)

    def log(self, step, values):
        self._try("log", lambda: self.tracker.log(values, step=step))

    def finish(self, exit_code):
        """End with the true state: 0 finished, anything else failed."""
        self._try("finish", lambda: self.tracker.run.finish(exit_code=exit_code))
        self.live = False

    def _try(self, what, call):
        """Call W&B; training neither waits for ever nor fails with it."""
        if self.live and (fault := fault_of(call, PATIENCE)):
            self.live = False
            print(f"W&B did not {what} ({fault}); the run goes on without it, its record is "
                  "metrics.jsonl.", file=sys.stderr)
            fault_of(leave, 1)


def leave():
    """Let W&B wait for its own process here, for it would else do so at exit, for ever."""
    import wandb

    wandb.teardown(1)


def fault_of(call, patience):
    """What went wrong in a call, made in a thread of its own, or that it takes too long."""
    faults = []

    def work():
        try:
            call()
        except BaseException as error:  # wandb has its own, and calls sys.exit
            faults.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(patience)
    return faults[0] if faults else f"no answer in {patience} s" * thread.is_alive()
