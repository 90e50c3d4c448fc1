"""Many processes, one outcome: failures, decisions and a lock on which all ranks agree.

A rank that raises while the others wait in a collective leaves them hanging. Here every rank
catches locally, leaves the `except` block, and tells the others in a collective that all reach.
"""

import time

import torch.distributed as dist

from ups.config import UsageError
from ups.files import lock


def everyone(accelerator, value):
    """The value of every rank, in their order."""
    values = [value] * accelerator.num_processes
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def agree(accelerator, work, *args):
    """Return `work(*args)`; where it fails on one rank, every rank raises, with one sentence."""
    result = error = note = None
    try:
        result = work(*args)
    except (UsageError, OSError) as caught:
        error, note = caught, (UsageError, str(caught))
    except Exception as caught:
        error, note = caught, (RuntimeError, f"{type(caught).__name__}: {caught}")
    for kind, text in filter(None, everyone(accelerator, note)):
        if note and note[0] is RuntimeError:
            raise error  # where it happened: with its traceback
        raise kind(text) from error
    return result


def take_lock(accelerator, path):
    """Wait until the main process holds the lock; the collectives are short, so none times out."""
    while True:
        held = agree(accelerator, lambda: accelerator.is_main_process and try_lock(path) or None)
        if any(everyone(accelerator, held is not None)):
            return held
        time.sleep(0.5)


def try_lock(path):
    """Lock a file of the cache; None where another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return lock(path)
    except OSError as error:
        raise UsageError(f"the cache {path.parent} cannot be written ({error.strerror}); give "
                         "another --cache.") from None
