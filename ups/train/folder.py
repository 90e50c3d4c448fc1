"""The folder of a stage belongs to one launch at a time, and to the configuration it began with.

Its `.lock` is held by that launch, and holds what the next one needs to know if this one dies
without a word. All of this is the main process's.
"""

import contextlib
import json
import shutil
import sys

from ups.config import UsageError, flat
from ups.files import lock_folder, read_json, refuse_links, write_json
from ups.memory import kernel_kills
from ups.train.checkpoint import checkpoints, step_of
from ups.train.ranks import MEMORY, place


def take(run, systems):
    """Lock the folder of `run`; how the last launch ended (`exit.json`, or empty).

    Another configuration is refused. Fields named in `systems` may change, and so may those that
    only one version of the code has. Nothing is written: `begin` does that.
    """
    folder, config = run.folder, flat(run.cfg)
    refuse_links(folder, run.cfg.run)
    run.lock = lock_folder(folder, "--run")
    if run.cfg.dry_run:  # forget what one that was killed has left
        for path in {*folder.iterdir()} - {folder / ".lock"}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    end = read_json(folder / "exit.json") or _killed(folder)
    finished = end.get("status") == "done"
    if finished or checkpoints(folder / "checkpoints"):
        old = read_json(folder / "config.json")
        if config["minutes"]:  # they became steps, once and for all
            end["steps"] = config["steps"] = old.get("steps")
            systems -= {"minutes"}
        if fault := _fault(folder, old, config, systems, finished):
            run.lock.close()
            raise UsageError(f"{folder} {fault}.")
    if finished:
        print(f"{folder} is finished (step {end['step']}); its test numbers are in "
              f"{folder / 'test.json'}. For a new run give another --run; to write model and "
              "numbers again from the last checkpoint, remove exit.json there.")
    return end


def _fault(folder, old, new, systems, finished):
    """What speaks against going on in this folder, or None."""
    if not old:
        return ("has no config.json, so nobody knows what it was trained with; put it back, or "
                "give another --run")
    changed = [key for key in sorted(old.keys() & new.keys() - systems) if old[key] != new[key]]
    if not changed:
        return None
    cure = "Use the old values to resume, or give another --run"
    if finished and changed == ["steps"] and old["steps"] < new["steps"]:
        cure = ("Its learning rate ended with its steps; to train its weights further, give "
                f"another --run and --init {folder.parent}")
    names = ", ".join(f"{key} ({old[key]} -> {new[key]})" for key in changed)
    return f"was trained with another configuration: {names}. {cure}"


def begin(folder, config, micro_batch):
    """The launch is accepted: its configuration holds, the end of the last one is history."""
    write_json(folder / "config.json", config)
    (folder / "exit.json").unlink(missing_ok=True)
    begun = {"place": place(), "kernel_kills": kernel_kills(), "micro_batch": micro_batch}
    (folder / ".lock").write_text(json.dumps(begun))


def leave(folder):
    """Wrong use, found before any training, leaves no folder behind that says nothing."""
    if {path.name for path in folder.iterdir()} <= {".lock"}:
        remove(folder)


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the run's folder is not empty
        folder.parent.rmdir()


def _killed(folder):
    """The end of a launch that could not write one, now written; empty where none has begun."""
    try:
        begun = json.loads((folder / ".lock").read_text())
        memory = begun["place"][:2] == place()[:2] and begun["kernel_kills"] < kernel_kills()
        rows = int(begun["micro_batch"])
    except (ValueError, TypeError, LookupError):  # empty, or not ours
        return {}
    if not (folder / "config.json").exists():  # a dry run clears its folder
        return {}
    reason = MEMORY if memory else "it was killed, or the machine went down"
    print(f"{folder}: the last launch ended without a word: {reason}.", file=sys.stderr)
    step = max(map(step_of, checkpoints(folder / "checkpoints")), default=0)
    end = {"status": "out_of_memory" if memory else "failed", "step": step, "reason": reason,
           "micro_batch": rows}
    write_json(folder / "exit.json", end)
    return end
