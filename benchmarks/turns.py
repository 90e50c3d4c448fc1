"""The same seconds for every model, on a device that they share.

Several processes compile and train at the same time, and each takes the number of steps that it
could take in the given seconds alone: it times its steps while all others stand still (two file
locks), and the number of steps follows. So neither compilation nor validation nor the neighbours
cost a model a step.
"""

import contextlib
import fcntl
from pathlib import Path

from train_operator import unroll_at
from ups.train.ranks import now

CHUNK = 20    # steps that are timed in one go
TIMED = 19    # times that this is done, so that each unroll up to 6 comes; the least counts
PATIENCE = 50  # steps between two pauses of a training


class Turns:
    """Whoever trains is in the room with others; whoever times its steps has it alone."""

    def __init__(self, folder):
        self.door, self.room = (open(Path(folder) / name, "w") for name in (".door", ".room"))
        self.steps = 0
        fcntl.flock(self.room, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self):
        fcntl.flock(self.room, fcntl.LOCK_UN)
        fcntl.flock(self.door, fcntl.LOCK_EX)  # nobody enters any more
        fcntl.flock(self.room, fcntl.LOCK_EX)  # all have left
        try:
            yield
        finally:
            fcntl.flock(self.room, fcntl.LOCK_SH)
            fcntl.flock(self.door, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def outside(self):
        """While something else is done than stepping, compiling say."""
        fcntl.flock(self.room, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self.door, fcntl.LOCK_SH)
            fcntl.flock(self.room, fcntl.LOCK_SH)
            fcntl.flock(self.door, fcntl.LOCK_UN)

    def step(self):
        """Before every step: now and then, let those in who wait."""
        self.steps += 1
        if self.steps % PATIENCE == 0:
            now()
            with self.outside():
                pass


def step_times(marks):
    """Seconds of a step by unroll: the least of what `marks`, (step, unroll, now()), enclose, as
    what others do beside it (compile, say) only adds.

    A mark says that from its step on steps have its unroll.
    """
    times = {}
    for (first, unroll, begin), (last, _, end) in zip(marks, marks[1:], strict=False):
        times.setdefault(unroll, []).append((end - begin) / (last - first))
    return {unroll: min(values) for unroll, values in times.items()}


def steps_within(seconds, times):
    """How many steps of that schedule take `seconds`, where `times` maps an unroll to its time."""
    later = [times[u] for u in times if u > 1] or [times[1]]
    return max(8, round(seconds / (0.7 * times[1] + 0.3 * sum(later) / len(later))))


def seconds_at(step, steps, times):
    """What the first `step` of `steps` steps take alone."""
    return sum(times[unroll_at(k, steps, max(times))] for k in range(step))
