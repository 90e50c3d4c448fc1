"""Train each part of the operator by itself, for a few steps, under DDP, FSDP2 or one process.

    parts.py FOLDER     (two processes) trains every part under DDP and FSDP2, then goes on with
                        some from the checkpoints of the others, those of one process included

FOLDER/PART/NAME/ holds the run, and from each rank what the tests compare. NAME is the strategy
that trained it, or FIRST-THEN where the second went on from the first one's checkpoint.
"""

import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import fsdp_on_cpu
import torch
from accelerate.state import PartialState
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from toy import Windows, loss

from ups.models.body import BodyConfig
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import set_lr
from ups.train.run import Run, RunConfig
from ups.train.step import Backward

CIRCLE, WALLS = (True, True, True), (False, False, False)
STEPS, SAVED = 6, 3
LINE = TaskSpec("line", (1, 1, 16), 3, CIRCLE)
NAMED = TaskSpec("named", (1, 1, 16), 3, CIRCLE, ("nu", "beta"))
SQUARE = TaskSpec("square", (1, 4, 6), 2, WALLS, ("nu",))
BOX = TaskSpec("box", (3, 2, 6), 4, CIRCLE, ("beta",))


@dataclasses.dataclass(frozen=True)
class Part:
    model: BodyConfig
    tasks: tuple[TaskSpec, ...] = (NAMED,)
    micro_batch: int = 0
    compile: bool = False
    recompute: bool = False
    precision: str = "no"


def size(body, depth, **more):
    return BodyConfig(body=body, dim=8, depth=depth, heads=2, modes=4, kernel=3, **more)


PARTS = {
    "plain": Part(size("plain", 1), tasks=(LINE,), micro_batch=3),
    "fourier": Part(size("fourier", 2), tasks=(LINE, SQUARE, BOX), recompute=True),
    "pdet": Part(size("pdet", 3, window=2), tasks=(LINE, SQUARE, BOX)),
    "compile": Part(size("fourier", 1), compile=True),
    "bf16": Part(size("pdet", 3, window=2), tasks=(NAMED, SQUARE), precision="bf16"),
}
RESUMED = ("fourier", "bf16")


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    steps: int = STEPS
    batch_size: int = 8
    seed: int = 0
    save_every: int = SAVED


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train(name, strategy, folder):
    """Train to the end, from a checkpoint in `folder` if there is one, and record what happened."""
    part = PARTS[name]
    cfg = Config(run=str(folder), micro_batch=part.micro_batch)
    with fsdp_on_cpu.strategy(strategy, part.precision):
        run = Run(cfg, "part")
    accelerator = run.accelerator
    dtype = torch.float64 if part.precision == "no" else torch.float32
    model = LatentOperator(part.model, part.tasks).to(dtype)
    for block in model.body.blocks:
        block.recompute = part.recompute
    if part.compile:
        torch.compiler.reset()
        model.compile(dynamic=False, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    loader = run.loader(Windows(part.tasks, dtype))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema = EMA(model, 0.9)
    backward = Backward(run, model, partial(loss, tasks=part.tasks))
    run.resume(model, optimizer, ema, backward, built_on={})
    record = {"world": accelerator.num_processes, "start": run.step, "losses": [], "norms": [],
              "with": [], "kind": str(accelerator.distributed_type)}
    named = dict(accelerator.unwrap_model(model).named_parameters())
    for batch in run.progress(loader):
        batch["noise"] = noise.normal(batch, cfg, *batch["z"].shape[2:], use="noise").to(dtype)
        record["losses"].append(float(backward(batch)))
        grads = {f"grad/{name}": full(p.grad) for name, p in named.items() if p.grad is not None}
        record["with"].append([batch["task"], sorted(grads)])
        record["norms"].append(float(full(accelerator.clip_grad_norm_(model.parameters(), 0.1))))
        set_lr(optimizer, 1e-2 / run.step)
        optimizer.step()
        ema.update(model)
        if run.every(2):
            ema.keep_best(record["losses"][-1])
        if run.every(cfg.save_every):
            run.save()
    with ema.applied(model):
        run.export(model, {"part": True})
    run.agree.close()
    if run.lock:
        run.lock.close()  # and no more: the end of a run is the end of the process group

    own = [p.to_local() if isinstance(p, DTensor) else p for p in named.values()]
    moments = [value["exp_avg"] for value in optimizer.optimizer.state.values()]
    record |= {
        "parameters": sum(p.numel() for p in named.values()),
        "held": sum(p.numel() for p in own),
        "held_moments": sum((m.to_local() if isinstance(m, DTensor) else m).numel()
                            for m in moments),
        "groups": sum(isinstance(m, FSDPModule) for m in model.modules()),
    }
    tensors = grads | {f"model/{name}": full(p) for name, p in named.items()}
    for kind in ("shadow", "best"):
        tensors |= {f"{kind}/{name}": full(t)
                    for name, t in zip(named, getattr(ema, kind), strict=True)}
    save_file(tensors, folder / f"rank{accelerator.process_index}.safetensors")
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(record))


def go_on(name, first, then, folder):
    """Train under `then` from the checkpoint that `first` wrote half way."""
    goal, step = folder / name / f"{first}-{then}", f"part/checkpoints/step_{SAVED}"
    if PartialState().is_main_process:
        shutil.copytree(folder / name / first / step, goal / step)
        shutil.copy(folder / name / first / "part/config.json", goal / "part")
    PartialState().wait_for_everyone()
    train(name, then, goal)


def main(folder):
    for strategy in ("ddp", "fsdp"):
        for name in PARTS:
            train(name, strategy, folder / name / strategy)
    for name in RESUMED:
        for first, then in (("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp"), ("one", "fsdp")):
            go_on(name, first, then, folder)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
