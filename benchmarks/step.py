"""How fast is a training step, and what do --compile and augmentation change? One GPU.

    python -m benchmarks.step --steps 300
    python -m benchmarks.step --steps 300 --against ../before

Every speed is printed as soon as it is measured, on the same data: the loop of train_operator.py
without and with `--compile`, with its augmentation and noise, and with a loader worker. `bare
graph` is what a step can reach: the same compiled model on one batch, clipping and fused AdamW in
one CUDA graph, products rounded as in the script, and nothing of `ups/train`. `--against` adds the
default loop of another checkout of this project, in a process of its own.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import train_operator as script
from benchmarks import scripts
from benchmarks.tables import device_name, heading, row
from ups.config import RunError, UsageError, check, command, parse
from ups.data.make import make
from ups.latents import open_latents
from ups.models.latent_operator import LatentOperator
from ups.models.precision import BACKWARD, products
from ups.train.ranks import make_accelerator, now


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = "burgers1d"
    preset: str = "medium"   # of the data
    batch_size: int = 64
    steps: int = 600         # that are timed, after a third as many
    against: str = ""        # folder of another checkout

    def __post_init__(self):
        check(self, batch_size=(1, 2**20), steps=(30, 10**6))
        if self.against and not (Path(self.against) / "train_operator.py").exists():
            raise UsageError(f"--against {self.against}: there is no train_operator.py in it.")


def flags(cfg, root, name, steps, **more):
    """The command line of a training; `more` are fields of train_operator.Config."""
    return scripts.argv({"run": root / name, "data": root / "data", "cache": root / "cache",
                         "tasks": cfg.task, "batch_size": cfg.batch_size, "steps": steps,
                         "eval_every": 10**6, "save_every": 10**6, "val_trajectories": 2} | more)


def other_speed(cfg, words):
    """The speed of the other checkout's script."""
    path = str(Path(cfg.against).resolve())
    done = subprocess.run(
        [sys.executable, scripts.__file__, str(cfg.steps), *words], cwd=path, text=True,
        capture_output=True, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        raise RunError(f"--against {cfg.against} failed: {done.stderr.strip()[-500:]}")
    return float(done.stdout.split()[-1])


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
        with products("highest"):
            mean = loss(model, batch).mean()
        with products(BACKWARD):
            mean.backward()
        torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip, foreach=True)
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for count in (steps // 3, steps):
        begin = now()
        for _ in range(count):
            graph.replay()
        speed = count / (now() - begin)
    return speed


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    if not torch.cuda.is_available():
        raise UsageError("this benchmark needs a CUDA device.")
    with tempfile.TemporaryDirectory() as name:
        root, start, steps = Path(name), now(), cfg.steps
        make(cfg.task, out=root / "data", preset=cfg.preset)
        most = steps + steps // 3
        single = {"augment": False, "noise": 0.0}
        bare_words = flags(cfg, root, "bare", most, **single)
        heading(f"{cfg.task} {cfg.preset}, batches of {cfg.batch_size}, {device_name()}, "
                f"torch {torch.__version__}", "loop", "steps/s", "of bare", "at s")
        bare = bare_speed(bare_words, steps)

        def show(label, speed):
            row(label, f"{speed:.1f}", f"{speed / bare:.2f}", f"{now() - start:.0f}")

        show("bare graph", bare)
        few = steps // 3
        show("eager", scripts.speed(script, flags(cfg, root, "eager", few + few // 3, **single),
                                    few))
        show("--compile", scripts.speed(
            script, flags(cfg, root, "compile", most, compile=True, **single), steps))
        full = flags(cfg, root, "full", most, compile=True)
        show("--compile, augmentation and noise", scripts.speed(script, full, steps))
        show("the same with a loader worker", scripts.speed(
            script, flags(cfg, root, "worker", most, compile=True, workers=1), steps))
        if cfg.against:
            words = flags(cfg, root, "against", most, compile=True, cache=root / "cache2")
            show(f"default loop of {cfg.against}", other_speed(cfg, words))


if __name__ == "__main__":
    command(main)
