"""How fast is a training step, and what do --compile and augmentation change? One GPU.

    python -m benchmarks.step --steps 300

Every speed is printed as soon as it is measured, on the same data: the loop of train_operator.py
without and with `--compile`, with its augmentation and noise, and with a loader worker. `bare
graph` is what a step can reach: the same compiled model on one batch, clipping and fused AdamW in
one CUDA graph, products rounded as in the script, and nothing else of `ups/train`.
"""

import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import train_operator as script
from benchmarks import bench
from benchmarks.bench import device_name, heading, row
from ups.config import UsageError, check, command, parse
from ups.data.make import make
from ups.latents import open_latents
from ups.models.latent_operator import LatentOperator
from ups.models.precision import TRAINING, products
from ups.train.ranks import make_accelerator, now
from ups.train.step import CudaGraphed


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = "burgers1d"
    preset: str = "medium"   # of the data
    batch_size: int = 64
    steps: int = 600         # that are timed, after a third as many

    def __post_init__(self):
        check(self, batch_size=(1, 2**20), steps=(30, 10**6))


def flags(cfg, root, name, steps, **more):
    """The command line of a training; `more` are fields of train_operator.Config."""
    return bench.argv({"run": root / name, "data": root / "data", "cache": root / "cache",
                       "tasks": cfg.task, "batch_size": cfg.batch_size, "steps": steps,
                       "eval_every": 10**6, "save_every": 10**6, "val_trajectories": 2} | more)


def bare_speed(words, steps):
    """Steps per second of forward, backward, clipping and AdamW in one graph."""
    cfg = parse(script.Config, words)
    latents = open_latents(SimpleNamespace(accelerator=make_accelerator()), cfg, "train")
    batch = latents.windows.__getitems__([(0, i, (0, 7 * i)) for i in range(cfg.batch_size)])
    batch = {k: v.cuda() if torch.is_tensor(v) else v for k, v in batch.items()}
    model = LatentOperator(cfg.model, [latents.tasks[0].spec]).cuda()
    model.compile(dynamic=False)
    params, loss = list(model.parameters()), partial(script.operator_loss, tasks=latents.tasks)
    optimizer = torch.optim.AdamW(params, cfg.lr, fused=True, capturable=True)

    def step():
        optimizer.zero_grad(set_to_none=False)
        with products(TRAINING if model.body.rounded else "highest"):
            mean = loss(model, batch).mean()
        with products(TRAINING):
            mean.backward()
        torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip, foreach=True)
        optimizer.step()

    call = CudaGraphed(step)
    for count in (steps // 3, steps):
        begin = now()
        for _ in range(count):
            call()
        speed = count / (now() - begin)
    return speed


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    if not torch.cuda.is_available():
        raise UsageError("this benchmark needs a CUDA device.")
    with tempfile.TemporaryDirectory() as name:
        root, start, steps = Path(name), now(), cfg.steps
        make(cfg.task, out=root / "data", preset=cfg.preset)
        most, single = steps + steps // 3, {"augment": False, "noise": 0.0}
        heading(f"{cfg.task} {cfg.preset}, batches of {cfg.batch_size}, {device_name()}, "
                f"torch {torch.__version__}", "loop", "steps/s", "of bare", "at s")
        bare = bare_speed(flags(cfg, root, "bare", most, **single), steps)

        def show(label, speed):
            row(label, f"{speed:.1f}", f"{speed / bare:.2f}", f"{now() - start:.0f}")

        show("bare graph", bare)
        few = steps // 3
        show("eager", bench.speed(script, flags(cfg, root, "eager", few + few // 3, **single), few))
        for label, more in (("--compile", single), ("--compile, augmentation and noise", {}),
                            ("the same with a loader worker", {"workers": 1})):
            words = flags(cfg, root, f"{len(label)}", most, compile=True, **more)
            show(label, bench.speed(script, words, steps))


if __name__ == "__main__":
    command(main)
