"""A stage in miniature on the real run core: a tiny operator that learns to shift its latents.

Float64, so that what is equal in exact arithmetic is equal to many digits. Writes the weights and
the rows that each rank saw, for the tests to compare.
"""

import atexit
import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils.data import Dataset

from ups.config import command, parse
from ups.models.body import BodyConfig
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import set_lr
from ups.train.run import Run, RunConfig
from ups.train.step import Backward

WINDOWS = 60  # of each task
TASK = TaskSpec("toy", (1, 1, 16), 3, (True, True, True), ("nu",))
DIE_AT = int(os.environ.get("DIE_AT", 0))


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    steps: int = 8
    batch_size: int = 12
    seed: int = 0
    lr: float = 1e-2
    save_every: int = 3
    log_every: int = 1
    dtype: str = "float64"
    variants: tuple[int, ...] = (0,)  # micro-batches to train with, one after the other


class Windows(Dataset):
    """Latents that move on by one token and shrink, faster where the first parameter is larger."""

    def __init__(self, tasks, dtype):
        source, width = torch.Generator().manual_seed(7), max(task.width for task in tasks)
        self.z, self.cond, self.sizes = [], [], [WINDOWS] * len(tasks)
        for task in tasks:
            own = (torch.arange(width) < task.width).to(dtype)
            count = torch.Size(task.tokens).numel()
            z = torch.randn(WINDOWS, count, width, generator=source, dtype=dtype)
            self.z.append(z * own)
            self.cond.append(torch.randn(WINDOWS, 2, generator=source, dtype=dtype))

    def __len__(self):
        return WINDOWS * len(self.sizes)

    def __getitems__(self, triples):
        steps, rows, pairs = zip(*triples, strict=True)
        (task, *_), index = (list(column) for column in zip(*pairs, strict=True))
        z, cond = self.z[task][index], self.cond[task][index]
        after = z.roll(1, 1) / (2 + cond[:, :1, None].tanh())
        return {"z": torch.stack([z, after], 1), "cond": cond, "dt": 0.1 + cond[:, 1].abs(),
                "step": steps[0], "rows": torch.tensor(rows), "index": torch.tensor(index),
                "task": task}


def loss(model, batch, tasks=(TASK,)):
    z0, z1 = batch["z"].unbind(1)
    z1_hat = model(z0 + 0.01 * batch["noise"], batch["dt"], batch["cond"], batch["task"])
    own = torch.arange(z0.shape[2]) < tasks[batch["task"]].width  # not the padding
    return (own.to(z0) * (z1_hat - z1) ** 2).mean((1, 2))


def train(run, cfg):
    accelerator, dtype = run.accelerator, getattr(torch, cfg.dtype)
    model = LatentOperator(BodyConfig(dim=8, depth=1, heads=2, modes=4), [TASK]).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr, weight_decay=0.0)
    loader = run.loader(Windows([TASK], dtype))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema = EMA(model, 0.9)
    backward = Backward(run, model, loss)
    run.resume(model, optimizer, ema, backward, built_on={"data": "seven"})
    seen = []
    for batch in run.progress(loader):
        seen.append(batch["index"])
        batch["noise"] = noise.normal(batch, cfg, *batch["z"].shape[2:], use="noise").to(dtype)
        value = backward(batch)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        set_lr(optimizer, cfg.lr / run.step)
        optimizer.step()
        ema.update(model)
        if run.every(cfg.log_every):
            run.log({"train/loss": value})
        if run.every(3):
            ema.keep_best(float(value))
        if run.every(cfg.save_every) or run.stopping:
            run.save()
        if run.step == DIE_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    run.export(model, {"toy": True})
    return model, ema, seen


def main(argv=None):
    cfg = parse(Config, argv)
    for micro in cfg.variants:
        part = dataclasses.replace(cfg, run=f"{cfg.run}/micro{micro}", micro_batch=micro)
        run = Run(part, "toy")
        try:
            model, ema, seen = train(run, part)
        except BaseException as error:
            run.__exit__(type(error), error, error.__traceback__)
            raise
        rank, folder = run.accelerator.process_index, Path(part.run)
        tensors = {"world": torch.tensor(run.accelerator.num_processes)}
        if seen:
            tensors["seen"] = torch.stack(seen)
        weights = run.accelerator.unwrap_model(model).named_parameters()
        tensors |= {f"model/{name}": p.detach().clone() for name, p in weights}
        tensors |= {f"ema/{i}": p.clone() for i, p in enumerate(ema.shadow)}
        save_file(tensors, folder / f"rank{rank}.safetensors")
        if micro == cfg.variants[-1]:  # this ends the process group
            run.__exit__(None, None, None)
        else:
            run.agree.close()


def print_threads():
    """Those that were joined are listed for a moment longer."""
    names = ["gloo"]
    for _ in range(300):
        with contextlib.suppress(OSError):  # one has gone meanwhile
            names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        if not any("gloo" in name for name in names):
            break
        time.sleep(0.2)
    print(f"threads of rank {os.environ.get('RANK', 0)} at exit: {' '.join(names)}")


if __name__ == "__main__":
    atexit.register(print_threads)
    command(main)
