"""What processes agree on: an outcome, a value, a lock, the flags of a step, one Accelerator.

A rank that raises while the others wait in a collective leaves them hanging. Here every rank
catches locally, leaves the `except` block, and tells the others in a collective that all reach.
"""

import contextlib
import itertools
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
from torch.distributed import distributed_c10d

from ups.config import RunError, UsageError
from ups.files import lock
from ups.memory import kernel_kills

LEAST, OVER = 10, b"over"  # seconds of silence that always are borne; the word of who has ended
PREPARE = 6 * 3600  # seconds for which the others wait while one process reads large data
ALARM = signal.SIGALRM  # ends a rank that waits, which has said why
GONE = "a rank is gone: its own message says why; run the same command again."
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
        self.watched = [(rank, pid) for rank, (*where, pid) in enumerate(places)
                        if where == here and pid != own and hasattr(os, "pidfd_open")]
        for one in self.watched:
            threading.Thread(target=self._watch, args=one, daemon=True).start()

    def _watch(self, rank, pid):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                handle, poll = os.pidfd_open(pid), select.poll()
                poll.register(handle, select.POLLIN)
                poll.poll()
                status = int(stat.read().split()[-1])
                os.close(handle)
        except OSError:  # its launcher was quicker
            return
        if os.WIFSIGNALED(status):
            self.signals[rank] = os.WTERMSIG(status)
            self.ended.set()

    def story(self, patience=2):
        """A sentence on the first death by a signal; empty without one."""
        if not (self.watched and self.ended.wait(patience)):
            return ""
        rank, number = next(iter(self.signals.items()))
        if number == ALARM:
            return ""
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
        self.patience, self.codes = max(LEAST, 0.8 * timeout), []
        self.late = accelerator.device.type == "cuda" and self.world > 1
        self.waits = 0  # how often it has begun or ended to wait for the others: odd while it does
        self.over, self.threads = threading.Event(), []
        places = everyone(accelerator, [*place(), secrets.token_hex(4)])
        self.deaths, self.token = Deaths([where for *where, _ in places]), places[0][-1]
        if self.late:
            self.copy = torch.empty(self.world, pin_memory=True)
            self.arrived = torch.cuda.Event()

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
        work = dist.all_reduce(buffer, async_op=True)

        def done():
            with contextlib.suppress(RuntimeError):  # it takes longer, or has failed
                work.wait(timedelta(seconds=0.2))
            return work.is_completed()

        self._wait(done)
        try:
            work.wait()
        except RuntimeError as error:
            raise RunError(GONE) from error
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
                    raise RunError(GONE)
                time.sleep(0 if time.monotonic() < began + 2e-3 else 1e-4)  # a GPU is about to be

    @contextlib.contextmanager
    def waiting(self):
        """Around what all ranks come to, each as often as the others."""
        self.waits += 1
        try:
            yield
        finally:
            self.waits += 1

    def listen(self, end):
        """Until `close`, tell the others every second that this process lives, and how far it is.

        `end(sentence)`, in another thread, names those that say nothing new, or have not come to
        where this one waits, for too many seconds in which it took no step itself. The first
        process hears all others, those hear the first.
        """
        if self.world > 1:
            store = distributed_c10d._get_default_store().clone()
            ranks = range(1, self.world) if self.rank == 0 else range(1)
            heard = dict.fromkeys(ranks, b"0")  # the last word of each
            self.threads = [threading.Thread(target=self._talk, args=(store, heard), daemon=True),
                            threading.Thread(target=self._count, args=(heard, end), daemon=True)]
            for thread in self.threads:
                thread.start()

    def _talk(self, store, heard):
        keys = [f"{self.token} lives {rank}" for rank in range(self.world)]
        with contextlib.suppress(RuntimeError):  # the store has ended with its launcher
            for second in itertools.count():
                store.set(keys[self.rank], f"{self.waits} {second}")
                heard.update(zip(heard, store.multi_get([keys[rank] for rank in heard]),
                                 strict=True))
                if self.over.wait(1):
                    break
            store.set(keys[self.rank], OVER)

    def _count(self, heard, end):
        """Count seconds of silence, by no clock, for none passes while this process stands still;
        and not where it talks, for a store whose machine is gone never answers."""
        silence, words, waits = dict.fromkeys(heard, 0), heard, None
        while not self.over.wait(1):
            before, words, last, waits = words, dict(heard), waits, self.waits
            for rank, word in words.items():
                missing = word != OVER and (
                    word == before[rank] or waits % 2 and int(word.split()[0]) < waits)
                silence[rank] = silence[rank] + 1 if missing and waits == last else 0
            if silent := [str(rank) for rank in heard if silence[rank] > self.patience]:
                end(f"rank {', '.join(silent)} does not answer after {self.patience:.0f} s; run "
                    "the same command again.")
                return

    def close(self):
        """Say no more. The threads hold the process group, which must not outlive the command."""
        self.over.set()
        for thread in self.threads:
            thread.join(5)


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
            InitProcessGroupKwargs(timeout=timedelta(seconds=max(600, 2 * timeout))),
        ],
    )
    if accelerator.num_processes > 1:  # all are here
        distributed_c10d._set_pg_timeout(timedelta(seconds=max(PREPARE, 2 * timeout)))
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
