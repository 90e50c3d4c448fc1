"""The memory of this machine: what is free of it, and whom the kernel killed when there was none.

Known on Linux; elsewhere nothing is refused and nobody was killed.
"""

import math
from pathlib import Path

from ups.config import UsageError

GIB = 2**30
CGROUPS = Path("/sys/fs/cgroup")  # of a container, a Slurm job, a systemd service


def kernel_kills():
    """How many processes of this machine the kernel has killed for want of memory."""
    return _counters(Path("/proc/vmstat")).get("oom_kill", 0)


def free_memory():
    """Bytes that this process may still take."""
    free = _counters(Path("/proc/meminfo")).get("MemAvailable:", math.inf) * 1024
    for folder, limit, used, cache in _groups():
        try:
            most = int((folder / limit).read_text())  # "max": no limit
            taken = int((folder / used).read_text()) - _counters(folder / "memory.stat")[cache]
            free = min(free, most - taken)
        except (OSError, ValueError, KeyError):
            continue
    return free


def require_memory(need, what, cure):
    """Refuse what cannot fit before it begins: the kernel would kill it without a word."""
    if need > (free := free_memory()):
        raise UsageError(f"{what} needs {need / GIB:.1f} GiB of this machine's memory, and "
                         f"{free / GIB:.1f} GiB are free; {cure}.")


def _groups():
    """Folders and file names of the control groups, of both versions, that limit this process."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        for inside in (path.lstrip("/"), ""):  # a container sees its own group as the root
            if not kinds:
                yield CGROUPS / inside, "memory.max", "memory.current", "file"
            elif kinds == "memory":
                yield (CGROUPS / "memory" / inside, "memory.limit_in_bytes",
                       "memory.usage_in_bytes", "total_cache")


def _counters(path):
    """Lines "name number .." of a file of the kernel."""
    try:
        lines = map(str.split, path.read_text().splitlines())
    except OSError:
        return {}
    return {name: int(number) for name, number, *_ in lines}
