"""Look at the machine before an expensive run: one line per check, and an exit code.

    python -m ups.doctor
    accelerate launch --config_file accelerate_configs/2gpu.yaml -m ups.doctor

Every rank runs every check; the main process prints the worst outcome of each, with the ranks where
they differ. `pass` is fine, `warn` is worth knowing, one `fail` makes the exit code 1 on all ranks.
A check that does not end within LIMIT seconds ends the process with a traceback that names it.
"""

import faulthandler
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from ups.config import Parser, command
from ups.train.policy import make_accelerator, now
from ups.train.tracking import fault_of

PACKAGES = ("torch", "accelerate", "numpy", "h5py", "safetensors")
OPTIONAL = ("wandb", "matplotlib")  # training goes on without them
LIMIT = 180  # seconds for all checks together; a first compilation is the longest
GIB = 2**30
PASS, WARN, FAIL = WORDS = ("pass", "warn", "fail")


def versions(accelerator):
    found, missing = [f"python {platform.python_version()}"], []
    for name in PACKAGES + OPTIONAL:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        found.append(f"not installed: {', '.join(missing)}")
    status = FAIL if set(missing) & set(PACKAGES) else WARN if missing else PASS
    return status, ", ".join(found)


def devices(accelerator):
    if accelerator.device.type != "cuda":
        return PASS, (f"{accelerator.device.type}, {os.cpu_count()} cores, "
                      f"threads per process: {torch.get_num_threads()}")
    free, total = torch.cuda.mem_get_info(accelerator.device)
    name = torch.cuda.get_device_name(accelerator.device)
    text = f"{accelerator.device} {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    return (PASS, text) if free > total / 2 else (WARN, f"{text}: another process uses it")


def all_reduce(accelerator):
    """Sum 1 .. n over the ranks, check it, and time it: bytes that cross a rank's link."""
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    if world == 1:
        return PASS, "one process, nothing to reduce"
    name = f"rank {rank} of {world} on {socket.gethostname()} {device}, {dist.get_backend()}"
    numbers = torch.full((2**24 if device.type == "cuda" else 2**20,), rank + 1.0, device=device)
    dist.all_reduce(numbers)
    expected = world * (world + 1) / 2
    if not (numbers == expected).all():
        return FAIL, f"{name}: the sum is {numbers[0]:g} instead of {expected:g}"
    seconds = []
    for _ in range(3):
        start = now()
        dist.all_reduce(numbers)
        seconds.append(now() - start)
    moved = 2 * (world - 1) / world * numbers.nbytes
    return PASS, f"{name}: {moved / min(seconds) / 1e9:.2f} GB/s"


def bf16(accelerator):
    source = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 128, 128, generator=source).to(accelerator.device)
    exact = (a.double() @ b.double()).norm()
    error = ((a.bfloat16() @ b.bfloat16()).double() - a.double() @ b.double()).norm() / exact
    text = f"a product in bfloat16 is right to {error:.1e}"
    if error < 1e-2:
        return PASS, text
    return (FAIL if accelerator.mixed_precision == "bf16" else WARN), text


def compiler(accelerator):
    """Failing is a fault on a GPU only: a CPU without a C++ compiler trains without --compile."""
    if not accelerator.is_local_main_process:
        return PASS, ""  # once per machine

    def line(x):
        return torch.sin(x) * 2 + 1

    x = torch.linspace(0, 1, 64, device=accelerator.device)
    try:
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # no pool of processes for one function
        inductor.cpp_cache_precompile_headers = False
        inductor.cpp.simdlen = 1  # nor a search for the widest vector instructions
        error = (torch.compile(line, dynamic=False)(x) - line(x)).abs().max().item()
    except Exception as caught:
        reason = (str(caught).strip() or type(caught).__name__).splitlines()[0]
        status = FAIL if accelerator.device.type == "cuda" else WARN
        return status, f"do not use --compile: {reason[:120]}"
    return (PASS if error < 1e-5 else FAIL), f"a compiled function is right to {error:.0e}"


def open_files(accelerator):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return FAIL, f"{soft} may be open at once, 1024 are wanted: `ulimit -n 4096`"
    return PASS, f"{'any number' if soft == resource.RLIM_INFINITY else soft} may be open at once"


def disk(accelerator):
    free = shutil.disk_usage(".").free / GIB
    return (PASS if free > 10 else WARN if free > 1 else FAIL), f"{free:.1f} GiB free here"


def shared_memory(accelerator):
    """NCCL and the loader's workers hand tensors over in it; containers often have 64 MiB."""
    if not os.path.isdir("/dev/shm"):
        return WARN, "there is no /dev/shm: keep --workers 0"
    free = shutil.disk_usage("/dev/shm").free / GIB
    return (PASS, f"{free:.1f} GiB free") if free >= 0.5 else (
        WARN, f"{free:.2f} GiB free: keep --workers 0, or start the container with --shm-size")


def wandb(accelerator):
    """A name server may take minutes to say no, so the question is asked in a thread."""
    mode = os.environ.get("WANDB_MODE", "online")
    if not accelerator.is_main_process:
        return PASS, ""  # only the main process talks to it
    if mode in ("offline", "disabled"):
        return PASS, f"WANDB_MODE is {mode}"
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    where = url.hostname, url.port or (80 if url.scheme == "http" else 443)
    if fault := fault_of(lambda: socket.create_connection(where, timeout=3).close(), 5):
        return WARN, f"{url.hostname} is not reachable ({fault}): use WANDB_MODE=offline"
    return PASS, f"{url.hostname} answers"


CHECKS = {"versions": versions, "devices": devices, "all-reduce": all_reduce, "bf16": bf16,
          "compile": compiler, "open files": open_files, "disk": disk,
          "shared memory": shared_memory, "W&B": wandb}


def examine(accelerator):
    """(status, text) of every check on this rank; what raises is a failure, and the next is tried.

    Only all-reduce communicates, and it comes to every rank whatever the others found.
    """
    found = []
    for check in CHECKS.values():
        try:
            found.append(check(accelerator))
        except Exception as error:
            found.append((FAIL, f"{type(error).__name__}: {error}".splitlines()[0]))
    return found


def merged(name, outcomes):
    """One (status, text) for the (status, text) of all ranks: the worst, and who says what."""
    status = max((status for status, _ in outcomes), key=WORDS.index)
    texts = dict.fromkeys(text for _, text in outcomes if text)
    if name == "versions" and len(texts) > 1:
        status = FAIL  # machines that differ train into each other's bugs
    if len(texts) == 1 or all(text.startswith("rank ") for text in texts):
        return status, ", ".join(texts)
    return status, "; ".join(f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes))


def main(argv=None):
    Parser(prog="python -m ups.doctor", description=__doc__).parse_args(argv)
    # a check that hangs, in a collective or a driver, ends the process and shows where
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    accelerator = make_accelerator()
    everyone = gather_object([examine(accelerator)])  # ranks x checks
    table = [merged(name, outcomes)
             for name, *outcomes in zip(CHECKS, *everyone, strict=True)]
    if accelerator.is_main_process:
        for name, (status, text) in zip(CHECKS, table, strict=True):
            print(f"{status}  {name:<14} {text}")
    accelerator.end_training()
    faulthandler.cancel_dump_traceback_later()
    return int(any(status == FAIL for status, _ in table))


if __name__ == "__main__":
    command(main)
