"""The same seconds for every model, on a device that they share.

Several processes compile and train at the same time, and each takes the number of steps that it
could take in the given seconds alone: it times its steps while all others stand still (two file
locks), and the number of steps follows. So neither compilation nor validation nor the neighbours
cost a model a step.
"""

import contextlib
import fcntl
from pathlib import Path

from ups.train.ranks import now

CHUNK = 20    # steps that are timed in one go
TIMED = 10    # times that this is done; the least counts
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


def step_seconds(marks):
    """Seconds of a step: the least of what `marks`, (step, now()), enclose, as what others do
    beside it (compile, say) only adds."""
    return min((end - begin) / (last - first)
               for (first, begin), (last, end) in zip(marks, marks[1:], strict=False))


def steps_within(seconds, step):
    """How many steps of `step` seconds take `seconds`."""
    return max(8, round(seconds / step))
