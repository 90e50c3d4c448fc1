"""The folder of a stage belongs to one launch at a time, and to the configuration it began with."""

import contextlib

from ups.config import UsageError
from ups.files import read_json, write_json
from ups.train.checkpoint import checkpoints


def leave_folder(folder):
    """Wrong use, found before any training, leaves no folder behind that says nothing."""
    if {path.name for path in folder.iterdir()} <= {".lock"}:
        (folder / ".lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the run's folder is not empty
            folder.rmdir()
            folder.parent.rmdir()


def take_folder(folder, config, systems):
    """How the last launch ended (`exit.json`, or empty); refuses another configuration.

    Fields named in `systems` may change, and so may those that only one version of the code has.
    Nothing is written: `begin_folder` does that when the launch is accepted.
    """
    end = read_json(folder / "exit.json")
    finished = end.get("status") == "done"
    if finished or checkpoints(folder / "checkpoints"):
        old = read_json(folder / "config.json")
        if not old:
            raise UsageError(f"{folder} has no config.json, so nobody knows what it was trained "
                             "with; put it back, or give another --run.")
        changed = [key for key in sorted(old.keys() & config.keys() - systems)
                   if old[key] != config[key]]
        if changed:
            names = ", ".join(f"{key} ({old[key]} -> {config[key]})" for key in changed)
            raise UsageError(f"{folder} was trained with another configuration: {names}. Use the "
                             "old values to resume, or give another --run.")
    if finished:
        print(f"{folder} is finished (step {end['step']}); its test numbers are in "
              f"{folder / 'test.json'}. For a new run give another --run; to write model and "
              "numbers again from the last checkpoint, remove exit.json there.")
    return end


def begin_folder(folder, config):
    """The launch is accepted: its configuration holds, the end of the last one is history."""
    write_json(folder / "config.json", config)
    (folder / "exit.json").unlink(missing_ok=True)
