"""What does it cost that the ranks agree in every step, beside the all-reduce of the gradients?

    accelerate launch --config_file 2gpu.yaml -m benchmarks.agreement
    accelerate launch --config_file 2gpu.yaml --num_processes 8 -m benchmarks.agreement

Milliseconds of a step, without forward and backward, taken in turns: the all-reduce alone, the
all-reduce in which the ranks also say how their step went (`ups.train.ranks.Agreement`), and the
all-reduce after a barrier and a reduction on the CPU, as a side channel would do it.
"""

import dataclasses
import statistics
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.tables import device_name, heading, row
from ups.config import UsageError, check, command, parse
from ups.train.ranks import Agreement, make_accelerator, now

TIMEOUT = timedelta(seconds=600)


@dataclasses.dataclass(frozen=True)
class Config:
    parameters: int = 200_000  # whose gradients are reduced
    steps: int = 400           # of each kind, in turns; the median counts

    def __post_init__(self):
        check(self, parameters=(1, 10**10), steps=(1, 10**6))


def main(argv=None):
    cfg, accelerator = parse(Config, argv, __doc__), make_accelerator()
    world, main = accelerator.num_processes, accelerator.is_main_process
    if world == 1:
        raise UsageError("one process agrees with itself; give --config_file 2gpu.yaml.")
    buffer = torch.zeros(cfg.parameters + 1 + world, device=accelerator.device)
    agree, side = Agreement(accelerator, 600), dist.new_group(backend="gloo", timeout=TIMEOUT)

    def ride():
        agree.read()
        agree.share(buffer, 0)

    def beside():
        dist.monitored_barrier(side, TIMEOUT, wait_all_ranks=True)
        dist.all_reduce(torch.zeros(4, dtype=torch.int64), op=dist.ReduceOp.MAX, group=side)
        dist.all_reduce(buffer)

    kinds = {"all-reduce alone": lambda: dist.all_reduce(buffer),
             "agreement in the all-reduce": ride, "agreement beside it": beside}
    times = {name: [] for name in kinds}
    for _ in range(cfg.steps):
        for name, step in kinds.items():
            begin = now()
            step()
            times[name].append(1e3 * (now() - begin))
    if main:
        medians = {name: statistics.median(values) for name, values in times.items()}
        heading(f"{world} ranks, {cfg.parameters} parameters, {device_name()}, "
                f"torch {torch.__version__}", "", "ms/step", "more")
        for name, value in medians.items():
            row(name, f"{value:.3f}", f"{value - medians['all-reduce alone']:+.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    command(main)
