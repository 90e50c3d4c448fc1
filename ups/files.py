"""Files and folders that are whole or as before, whatever happens meanwhile, and locks on files."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from numbers import Real
from pathlib import Path

from ups.config import UsageError


def lock(path, flag="--data"):
    """Hold a file until it is closed or its process ends, however it ends; None: another has it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")
    except OSError as error:
        raise UsageError(f"{path.parent} cannot be written ({error.strerror}); give another "
                         f"{flag}.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    os.register_at_fork(after_in_child=file.close)  # a loader's worker may outlive us
    return file


def lock_folder(folder, flag):
    """Hold a folder that one launch at a time may use."""
    held = lock(folder / ".lock", flag)
    if held is None:
        raise UsageError(f"{folder} is in use by another launch; wait for it, stop it, or give "
                         f"this one another {flag}.")
    return held


def refuse_links(folder, base):
    """A stranger's folder may hold links: what is written below it would land where they lead.

    W&B's own folder has such links to its logs; it makes them anew and does not write through them.
    """
    for path in (folder, *folder.rglob("*")):
        if "wandb" in path.relative_to(folder).parts[:-1]:
            continue
        if not path.resolve().is_relative_to(Path(base).resolve()):  # by its own link or another
            raise UsageError(f"{path} is a link to {path.resolve()}, outside of {base}; put the "
                             "files there themselves, or make all of the folder a link.")


def write_bytes(path, data):
    """Under another name first, flushed, then renamed: `path` never holds a part of it."""
    partial = Path(f"{path}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        flush(partial)
        partial.replace(path)
        flush(partial.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    finally:
        partial.unlink(missing_ok=True)  # the disk is full


def write_text(path, text):
    write_bytes(path, text.encode())


def write_json(path, value):
    write_text(path, json.dumps(value, indent=1) + "\n")


KINDS = {  # of the values that are used as they are; None: of any other name
    "exit.json": {"status": str, "reason": str, None: Real}, "config.json": {"strides": [int]},
    "choices.json": {None: {"plans": {None: [Real]}, "precision": str, None: Real}}}


def read_json(path):
    """An object, empty where there is no file."""
    try:
        value = json.loads(path.read_text()) if path.exists() else {}
        return _kind(value, KINDS.get(path.name, {}))
    except (TypeError, ValueError):
        cure = "give another --run" if path.name == "config.json" else "remove it"
        raise UsageError(f"{path} is damaged; put a sound copy back, or {cure}.") from None


def _kind(value, kind):
    if not isinstance(value, kind if isinstance(kind, type) else type(kind)):
        raise TypeError
    for name, one in value.items() if isinstance(kind, dict) else ():
        _kind(one, kind.get(name, kind.get(None, object)))
    for one in value if isinstance(kind, list) else ():
        _kind(one, *kind)
    return value


@contextlib.contextmanager
def written(folder):
    """A folder to write into that then replaces `folder`, which is thus whole or as before."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        plain = next(partial.rglob("*.json"))
        for path in (*partial.rglob("*"), partial):
            if path.is_file():  # safetensors lets no one else read
                shutil.copymode(plain, path)
            flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # of a failure
    flush(folder.parent)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
