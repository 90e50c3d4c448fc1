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
        mine = place()
        self.signals, self.before, self.ended = {}, kernel_kills(), threading.Event()
        pids = {rank: pid for rank, (*where, pid) in enumerate(places)
                if where == mine[:-1] and pid != mine[-1]}
        if pids and hasattr(os, "pidfd_open"):
            threading.Thread(target=self._watch, args=(pids,), daemon=True).start()

    def _watch(self, pids):
        poll, open_ = select.poll(), {}
        for rank, pid in pids.items():
            handle = os.pidfd_open(pid)
            open_[handle] = rank
            poll.register(handle, select.POLLIN)
        while open_:
            for handle, _ in poll.poll():
                rank = open_.pop(handle)
                poll.unregister(handle)
                os.close(handle)
                try:
                    status = Path(f"/proc/{pids[rank]}/stat").read_text().split()[-1]
                except OSError:  # its launcher was quicker
                    continue
                if os.WIFSIGNALED(int(status)):
                    self.signals[rank] = os.WTERMSIG(int(status))
                    self.ended.set()

    def story(self, patience=0.5):
        """`(memory, sentence)` of the first death by a signal; sentence is empty without one."""
        if not self.ended.wait(patience):
            return False, ""
        rank, number = next(iter(self.signals.items()))
        memory = number == signal.SIGKILL and kernel_kills() > self.before
        text = f"rank {rank} died by signal {number} ({signal.Signals(number).name})"
        return memory, text + f": {MEMORY}" * memory
