"""Check the machine before an expensive run: one line for each check, and an exit code.

    accelerate launch --config_file accelerate_configs/2gpu.yaml -m launch.check_machine

Every rank runs every check; the main process prints the worst outcome of each, with the ranks where
they differ. `pass` is fine, `warn` is worth knowing, one `fail` makes the exit code 1.
"""

import faulthandler
import os
import platform
import resource
import shutil
import sys

import accelerate
import torch
from accelerate.utils import gather_object

from ups.train.ranks import usable_gpu

LIMIT = 180  # seconds for all checks; then a traceback shows which one hangs
GIB = 2**30
PASS, WARN, FAIL = WORDS = ("pass", "warn", "fail")


def versions(accelerator):
    return PASS, (f"python {platform.python_version()}, torch {torch.__version__}, "
                  f"accelerate {accelerate.__version__}")


def devices(accelerator):
    if accelerator.device.type != "cuda":
        return PASS, f"{accelerator.device.type}, {os.cpu_count()} cores"
    free, total = torch.cuda.mem_get_info(accelerator.device)
    text = f"{torch.cuda.get_device_name(accelerator.device)}, {free / GIB:.0f} GiB free"
    return (PASS, text) if free > total / 2 else (WARN, f"{text}: another process uses it")


def all_reduce(accelerator):
    """Sum the ranks, 1 .. n, over 1 MiB of them."""
    world = accelerator.num_processes
    numbers = torch.full((2**18,), accelerator.process_index + 1.0, device=accelerator.device)
    total, right = accelerator.reduce(numbers, reduction="sum"), world * (world + 1) / 2
    if (total == right).all():
        return PASS, f"{world} processes agree"
    return FAIL, f"the sum over {world} processes is {total[0]:g} instead of {right:g}"


def bf16(accelerator):
    a, b = torch.randn(2, 128, 128, device=accelerator.device)
    exact = a.double() @ b.double()
    error = ((a.bfloat16() @ b.bfloat16()).double() - exact).norm() / exact.norm()
    return (PASS if error < 1e-2 else FAIL), f"a product is right to {error:.0e}"


def compiler(accelerator):
    """A CPU without a C++ compiler still trains without --compile."""
    try:
        x = torch.linspace(0, 1, 64, device=accelerator.device)
        torch.compile(lambda x: torch.sin(x) * 2 + 1)(x)
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        return (FAIL if accelerator.device.type == "cuda" else WARN), f"do not use --compile: {why}"
    return PASS, "torch.compile works"


def files(accelerator):
    limit, free = resource.getrlimit(resource.RLIMIT_NOFILE)[0], shutil.disk_usage(".").free / GIB
    if limit < 1024 and limit != resource.RLIM_INFINITY:
        return FAIL, f"{limit} may be open at once, 1024 are wanted: `ulimit -n 4096`"
    return (PASS if free > 10 else WARN if free > 1 else FAIL), f"{free:.1f} GiB of disk free here"


CHECKS = (versions, devices, all_reduce, bf16, compiler, files)


def main():
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    accelerator = accelerate.Accelerator(cpu=not usable_gpu())
    ranks = gather_object([[check(accelerator) for check in CHECKS]])  # ranks x checks
    worst = []
    for check, *found in zip(CHECKS, *ranks, strict=True):
        worst.append(max((status for status, _ in found), key=WORDS.index))
        texts = list(dict.fromkeys(text for _, text in found))
        if len(texts) > 1:
            texts = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found)]
        accelerator.print(f"{worst[-1]}  {check.__name__:<14} {'; '.join(texts)}")
    accelerator.end_training()
    faulthandler.cancel_dump_traceback_later()
    return int(FAIL in worst)


if __name__ == "__main__":
    sys.exit(main())
