"""What processes agree on: an outcome, a value, a lock, the flags of a step, one Accelerator.

A rank that raises while the others wait in a collective leaves them hanging. Here every rank
catches locally, leaves the `except` block, and tells the others in a collective that all reach.
"""

import contextlib
import ctypes
import math
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)

from ups.config import RunError, UsageError
from ups.files import lock
from ups.memory import kernel_kills

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LEAST, OVER = 10, b"over"  # seconds of silence that always are borne; the word of who has ended
MEMORY = "the kernel killed it because the machine ran out of memory"


class PeerFailed(RunError):
    """Another rank failed; its own message says why."""

    told = True


def everyone(accelerator, value):
    """The value of every rank, in their order."""
    values = [value] * accelerator.num_processes
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def together(accelerator, work, *args):
    """Return `work(*args)`; where it fails on one rank, every rank raises."""
    result = error = None
    try:
        result = work(*args)
    except Exception as caught:
        error = caught
    kind = UsageError if isinstance(error, UsageError) else PeerFailed
    faults = everyone(accelerator, error and (kind, str(error)))
    if error is not None:
        raise error  # where it happened: with its traceback
    for kind, text in filter(None, faults):
        raise kind(text)
    return result


def on_main(accelerator, work, *args):
    """Call `work` on the main process; every rank gets its result, or its failure."""
    main = accelerator.is_main_process
    return everyone(accelerator, together(accelerator, lambda: work(*args) if main else None))[0]


def take_lock(accelerator, path, flag):
    """Wait until the main process holds a lock; the collectives are short, so none times out."""
    main, held = accelerator.is_main_process, None
    while not any(everyone(accelerator, held is not None)):
        held = together(accelerator, lambda: lock(path, flag) if main else None)
        if main and held is None:
            time.sleep(0.5)
    return held


def place():
    """A name of this process: machine, its start, name space, number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"), os.getpid()]
    except OSError:
        return [socket.gethostname(), "", "", os.getpid()]


class Deaths:
    """Watch processes, given as the `place` of each rank; `signals[rank]` ended one of them.

    A rank whose peer dies sees a closed connection and no more. The kernel knows better: a file
    descriptor of a process says when it ends, and /proc keeps the status until its launcher asks
    for it, some tens of milliseconds later. Elsewhere than on Linux nothing is known.
    """

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
        """A sentence on the first death by a signal; empty without one."""
        if not self.ended.wait(patience):
            return ""
        rank, number = next(iter(self.signals.items()))
        memory = number == signal.SIGKILL and kernel_kills() > self.before
        text = f"rank {rank} died by signal {number} ({signal.Signals(number).name})"
        return text + f": {MEMORY}" * memory


class Agreement:
    """What the ranks tell each other in the all-reduce of the gradients; a missing one is named.

    The last elements of the buffer are theirs, one each: a small whole number. On a CPU they are
    read in the same step. On a GPU a copy of them travels to the host while training goes on, and
    is read before the next step begins: nothing waits for the device.
    """

    def __init__(self, accelerator, timeout):
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.patience, self.codes = 0.8 * timeout, []
        self.late = accelerator.device.type == "cuda" and self.world > 1
        self.waits, self.since = 0, math.inf
        self.over, self.beat = threading.Event(), None
        places = everyone(accelerator, [*place(), secrets.token_hex(4)])
        self.deaths, self.token = Deaths([where for *where, _ in places]), places[0][-1]
        if self.late:
            self.copy = torch.empty(self.world, pin_memory=True)
            self.arrived = torch.cuda.Event()
        elif self.world > 1:  # its threads end in time
            self.group = dist.new_group(timeout=timedelta(seconds=timeout + LEAST))

    def share(self, buffer, code):
        """Sum `buffer` over the ranks; `read` gives the code of each."""
        if self.world == 1:
            self.codes = [code]
            return
        if code:
            buffer[self.rank - self.world] = code
        if self.late:
            dist.all_reduce(buffer)
            self.copy.copy_(buffer[-self.world :], non_blocking=True)
            self.arrived.record()
            self.codes = None
            return
        work = dist.all_reduce(buffer, group=self.group, async_op=True)

        def done():
            with contextlib.suppress(RuntimeError):  # it takes longer, or is over
                work.wait(timedelta(seconds=0.2))
            return work.is_completed()

        self._wait(done)
        try:
            work.wait()
        except RuntimeError as error:
            fault = self.deaths.story() or "a rank is gone: its own message says why"
            raise RunError(f"{fault}; run the same command again.") from error
        self.codes = [int(code) for code in buffer[-self.world :].tolist()]

    def read(self):
        """What each rank said in the last `share`, once."""
        if self.codes is None:
            self._wait(self.arrived.query)
            self.codes = [int(code) for code in self.copy.tolist()]
        codes, self.codes = self.codes, []
        return codes

    def _wait(self, done):
        began = time.monotonic()
        with self.waiting():
            while not done():
                if self.deaths.ended.is_set():
                    raise RunError(f"{self.deaths.story()}; run the same command again.")
                time.sleep(0 if time.monotonic() < began + 2e-3 else 1e-4)  # a GPU is about to be

    @contextlib.contextmanager
    def waiting(self):
        """Around what all ranks come to, each as often as the others."""
        self.waits, self.since = self.waits + 1, time.monotonic()
        try:
            yield
        finally:
            self.since = math.inf

    def listen(self, end):
        """Until `close`, say every second that this process lives, and how often it has
        waited for the others. `end(sentence)`, in another thread, names those that stand still, or
        do not come where this one waits, for too long.

        The first process hears all others, those hear the first. Time in which this process stood
        still itself does not count.
        """
        if self.world == 1:
            return
        store = dist.distributed_c10d._get_default_store().clone()
        patience = max(LEAST, self.patience)
        store.set_timeout(timedelta(seconds=patience))
        keys = [f"{self.token} lives {rank}" for rank in range(self.world)]
        ranks = range(1, self.world) if self.rank == 0 else (0,)

        def told(silent, seconds):
            who = f"rank {', '.join(map(str, silent))}" if silent else "the network"
            end(f"{who} does not answer after {seconds:.0f} s; run the same command again.")

        def beat():
            heard, last, awake = {}, time.monotonic(), 0
            while not self.over.wait(1):
                began, since, waits = time.monotonic(), self.since, self.waits
                waited, everywhere = began - max(since, awake), []
                try:
                    store.set(keys[self.rank], f"{waits} {began}")
                    values = store.multi_get([keys[rank] for rank in ranks])  # once they have begun
                    if waited > self.patience:
                        everywhere = store.multi_get(keys)
                except RuntimeError:
                    if time.monotonic() - began > 0.9 * patience:
                        told([0] if self.rank else heard.keys() ^ {*ranks}, patience)
                    return  # else the store ended with the launcher, which ends us too
                now, still = time.monotonic(), began - last > LEAST
                awake = now if still else awake
                if everywhere and not still and since == self.since:
                    told([rank for rank, value in enumerate(everywhere)
                          if value != OVER and int(value.split()[0]) < waits], waited)
                for rank, value in zip(ranks, values, strict=True):
                    if still or rank not in heard or heard[rank][0] != value:
                        heard[rank] = value, now
                silent = [rank for rank, (value, since) in heard.items()
                          if now - since > patience and value != OVER]
                if silent:
                    told(silent, patience)
                last = now
            with contextlib.suppress(RuntimeError):
                store.set(keys[self.rank], OVER)

        self.beat = threading.Thread(target=beat, daemon=True)
        self.beat.start()

    def close(self):
        """Say no more. The thread holds the process group, which must not outlive the command."""
        self.over.set()
        if self.beat:
            self.beat.join(5)


class MixedAccelerator(Accelerator):
    """Give FSDP2 the autocast that Accelerate gives DDP alone.

    FSDP2 can cast a module's inputs instead, but then z0 in  z0 + update  is rounded to bf16 too.
    """

    def prepare(self, *args, **options):
        if self.is_fsdp2 and self.mixed_precision == "bf16":
            for model in args:
                if isinstance(model, torch.nn.Module):
                    cast = torch.autocast(self.device.type, torch.bfloat16)
                    model.forward = cast(model.forward)
        return super().prepare(*args, **options)


def usable_gpu():
    """Whether there is a GPU with float64, which sums and averages need."""
    if not torch.accelerator.is_available():
        return False
    kind = torch.accelerator.current_accelerator().type
    if kind == "mps":
        print("this Mac's GPU has no float64; using the CPU.", file=sys.stderr)
    return kind != "mps"


def make_accelerator(timeout=900):
    """An Accelerator with the policy of all stages; refuses what cannot train well.

    Batches are global, reductions float32, and nothing communicates behind the script's back.
    """
    launched = os.environ.keys() & {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}
    if launched and sys.platform == "linux":  # do not outlive the launcher
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # It takes a second to load, which --help need not wait for; but where torch loads it itself,
    # after a process group has begun, the threads of that group outlive the command.
    from torch.distributed.fsdp import MixedPrecisionPolicy

    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch's new name
    torch.backends.cudnn.deterministic = True  # else gradients of convolutions differ by chance
    torch.backends.cudnn.allow_tf32 = False  # exact, but for the steps that choose otherwise
    accelerator = MixedAccelerator(
        cpu=not usable_gpu(),
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=max(1800, 2 * timeout))),
        ],
    )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UsageError(f"mixed_precision {accelerator.mixed_precision} is not supported: small "
                         'gradients vanish in it; use "bf16" or "no" in the accelerate config.')
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded and accelerator.mixed_precision == "bf16":
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32,
            cast_forward_inputs=False)
    return accelerator


def now():
    """Seconds, when the device has done all that it was asked to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
