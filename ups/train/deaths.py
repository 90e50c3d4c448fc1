"""How another process of this machine died, and whether the kernel killed it for want of memory.

A rank whose peer dies sees a closed connection and no more. The kernel knows better: a file
descriptor of a process says when it ends, and /proc keeps the status until its launcher asks for
it, some tens of milliseconds later. Elsewhere than on Linux nothing is known.
"""

import os
import select
import signal
import socket
import threading
from pathlib import Path

from ups.memory import kernel_kills

MEMORY = "the kernel killed it because the machine ran out of memory"


def place():
    """A name of this process: machine, its start, name space, number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"), os.getpid()]
    except OSError:
        return [socket.gethostname(), "", "", os.getpid()]


class Deaths:
    """Watch processes, given as the `place` of each rank; `signals[rank]` ended one of them."""

    def __init__(self, places):
        *here, own = place()
        self.signals, self.before, self.ended = {}, kernel_kills(), threading.Event()
        if hasattr(os, "pidfd_open"):
            for rank, (*where, pid) in enumerate(places):
                if where == here and pid != own:
                    threading.Thread(target=self._watch, args=(rank, pid), daemon=True).start()

    def _watch(self, rank, pid):
        handle, poll = os.pidfd_open(pid), select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.close(handle)
        try:
            status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
        except OSError:  # its launcher was quicker
            return
        if os.WIFSIGNALED(status):
            self.signals[rank] = os.WTERMSIG(status)
            self.ended.set()

    def story(self, patience=0.5):
        """`(memory, sentence)` of the first death by a signal; sentence is empty without one."""
        if not self.ended.wait(patience):
            return False, ""
        rank, number = next(iter(self.signals.items()))
        memory = number == signal.SIGKILL and kernel_kills() > self.before
        text = f"rank {rank} died by signal {number} ({signal.Signals(number).name})"
        return memory, text + f": {MEMORY}" * memory
