"""The folder of a stage belongs to one launch at a time, and to the configuration it began with."""

import contextlib
import fcntl
import json
import os

from ups.config import UsageError
from ups.train.checkpoint import checkpoints
from ups.train.policy import write_json


def take_lock(folder):
    """Hold the folder until the file is closed or the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise UsageError(f"{folder} cannot be a run's folder ({error.strerror}); give another "
                         "--run.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{folder} is in use by another launch; wait for it, stop it, or give "
                         "this one another --run.") from None
    os.register_at_fork(after_in_child=lock.close)  # a loader's worker may outlive us
    return lock


def leave_folder(folder):
    """Wrong use, found before any training, leaves no folder behind that says nothing."""
    if not any((folder / name).exists() for name in ("checkpoints", "exit.json", "start")):
        for path in (folder / "config.json", folder / ".lock"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it, or the run's, is not empty
            folder.rmdir()
            folder.parent.rmdir()


def take_folder(folder, config, systems):
    """How the last launch ended (`exit.json`, or empty); refuses another configuration.

    Fields named in `systems` may change. Where nothing is trained yet, the new configuration holds.
    """
    stored, exit_json = folder / "config.json", folder / "exit.json"
    end = json.loads(exit_json.read_text()) if exit_json.exists() else {}
    finished = end.get("status") == "done"
    if stored.exists() and (finished or checkpoints(folder / "checkpoints")):
        old = json.loads(stored.read_text())
        changed = [key for key in sorted(old.keys() | config.keys())
                   if key not in systems and old.get(key) != config.get(key)]
        if changed:
            names = ", ".join(f"{key} ({old.get(key)} -> {config.get(key)})" for key in changed)
            raise UsageError(f"{folder} was trained with another configuration: {names}. Use the "
                             "old values to resume, or give another --run.")
    if finished:
        print(f"{folder} is finished (step {end['step']}); its test numbers are in "
              f"{folder / 'test.json'}. For a new run give another --run.")
    else:
        write_json(stored, config)
        exit_json.unlink(missing_ok=True)
    return end
