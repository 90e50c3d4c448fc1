"""Many processes, one outcome: failures, decisions and a lock on which all ranks agree.

A rank that raises while the others wait in a collective leaves them hanging. Here every rank
catches locally, leaves the `except` block, and tells the others in a collective that all reach.
"""

import fcntl
import time

import torch

from ups.config import UsageError

NOTE = 600  # bytes that travel: a sentence, after one byte that says of which kind
WRONG_USE, FAULT = 1, 2


def agree(accelerator, work, *args):
    """Return `work(*args)`; where it fails on one rank, every rank raises, with one sentence."""
    result, error, note = None, None, b""
    try:
        result = work(*args)
    except (UsageError, OSError) as caught:
        error, note = caught, bytes([WRONG_USE]) + str(caught).encode()
    except Exception as caught:
        error, note = caught, bytes([FAULT]) + f"{type(caught).__name__}: {caught}".encode()
    note = torch.tensor([list(note[:NOTE].ljust(NOTE, b"\0"))], dtype=torch.uint8)
    notes = accelerator.gather(note.to(accelerator.device)).cpu()  # (ranks, NOTE)
    for kind, *text in notes[notes[:, 0] > 0].tolist():
        if error is not None and note[0, 0] == FAULT:
            raise error  # where it happened: with its traceback
        text = bytes(text).rstrip(b"\0").decode(errors="ignore")
        raise (UsageError if kind == WRONG_USE else RuntimeError)(text) from error
    return result


def any_rank(accelerator, flag):
    """True on every rank where `flag` is true on one."""
    flag = torch.tensor([float(flag)], device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum").item())


def take_lock(accelerator, path):
    """Wait until the main process holds the lock; the collectives are short, so none times out."""
    while True:
        lock = agree(accelerator, lambda: accelerator.is_main_process and try_lock(path) or None)
        if any_rank(accelerator, lock is not None):
            return lock
        time.sleep(0.5)


def try_lock(path):
    """Lock a file until it is closed or its process ends; None where another one holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")
    except OSError as error:
        raise UsageError(f"the cache {path.parent} cannot be written ({error.strerror}); give "
                         "another --cache.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:
        file.close()
