"""What does it cost that the ranks agree in every step?

    accelerate launch --config_file 2gpu.yaml --num_processes 8 -m benchmarks.agreement

Milliseconds, in turns: first of the all-reduce of the gradients alone and of that in which the
ranks also say how their step went (`ups.train.ranks.Agreement`), then of a step of a small operator
with the one and the other.
"""

import dataclasses
import statistics
from types import SimpleNamespace

import torch
import torch.distributed as dist

from benchmarks.bench import device_name, heading, row
from ups.config import UsageError, check, command, parse
from ups.models.body import BodyConfig
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.train.optim import Muon
from ups.train.ranks import Agreement, make_accelerator, now
from ups.train.step import Backward, CudaGraphed


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int = 32    # of a batch, on each rank
    tokens: int = 64  # of a row
    steps: int = 200  # of each kind, in turns; the median counts

    def __post_init__(self):
        check(self, rows=(1, 10**6), tokens=(16, 10**6), steps=(1, 10**6))


class Mute:
    """All-reduce and say nothing."""

    late, share, read = True, staticmethod(lambda buffer, code: dist.all_reduce(buffer)), list


def loss(model, batch):
    z, dt = batch["z"], batch["dt"]
    return (model(z, dt, dt[:, None], 0) - 0.9 * z).square().mean((1, 2))


def trainer(cfg, accelerator, agree):
    """A function that takes a training step, and the gradients that it reduces."""
    cuda = accelerator.device.type == "cuda"
    run = SimpleNamespace(accelerator=accelerator, cfg=SimpleNamespace(micro_batch=0), graphs=cuda,
                          agree=agree, stop_requested=False, stopping=False, step=0)
    task = TaskSpec("toy", (1, 1, cfg.tokens), 8, (True, True, True), ("nu",))
    model = LatentOperator(BodyConfig(), [task])
    if cuda:
        model.compile(dynamic=False)
    model, optimizer = accelerator.prepare(model, Muon(model, 1e-3))
    backward, device = Backward(run, model, loss), accelerator.device
    batch = {"rows": torch.arange(cfg.rows, device=device),
             "z": torch.randn(cfg.rows, cfg.tokens, 8, device=device),
             "dt": torch.ones(cfg.rows, device=device)}
    update = CudaGraphed(optimizer.step, cuda)

    def step(agree):
        run.agree = agree
        backward(batch)
        update()

    return step, backward.flat


def table(title, kinds, steps, block):
    """Rows of the median milliseconds of each kind, `block` calls at a time, and what is more."""
    times = {name: [] for name in kinds}
    for _ in range(steps // block):
        for name, call in kinds.items():
            begin = now()
            for _ in range(block):
                call()
            times[name].append(1e3 / block * (now() - begin))
    if dist.get_rank() == 0:
        heading(title, "", "ms", "more")
        medians = {name: statistics.median(values) for name, values in times.items()}
        least = next(iter(medians.values()))
        for name, value in medians.items():
            row(name, f"{value:.3f}", f"{value / least - 1:+.1%}")


def main(argv=None):
    cfg, accelerator = parse(Config, argv, __doc__), make_accelerator()
    if accelerator.num_processes == 1:
        raise UsageError("one process agrees with itself; give --config_file 2gpu.yaml.")
    agree = Agreement(accelerator, 600)
    step, buffer = trainer(cfg, accelerator, agree)

    def ride():
        agree.read()
        agree.share(buffer, 0)

    table(f"{accelerator.num_processes} ranks, {len(buffer)} numbers, {device_name()}, "
          f"torch {torch.__version__}",
          {"all-reduce alone": lambda: dist.all_reduce(buffer), "agreement in it": ride},
          cfg.steps, 1)
    agree.read()
    for _ in range(8):  # compile, warm up, capture
        step(Mute)
    table(f"training steps of {cfg.rows} rows of {cfg.tokens} tokens on each rank",
          {"all-reduce alone": lambda: step(Mute), "with agreement": lambda: step(agree)},
          cfg.steps, 10)
    accelerator.end_training()


if __name__ == "__main__":
    command(main)
