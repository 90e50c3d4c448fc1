"""Learn the latent time step  z(t), dt, parameters -> z(t + dt)  of one or several PDEs.

    accelerate launch train_operator.py                                           # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_operator.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_operator.py --compile

Run the same command again to resume. Data, codec and latent cache are made where they are missing.
Writes into runs/NAME/operator/: metrics.jsonl, checkpoints/, model/, test.json and rollout.png.
"""

import dataclasses
import math
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from ups.cache.sampler import StepSampler
from ups.cache.windows import whole_batch
from ups.config import check, command, each, parse
from ups.eval.metrics import drift
from ups.eval.report import finish_operator
from ups.eval.rollout import measure
from ups.latents import check_codec, open_latents
from ups.models.latent_operator import LatentOperator, OperatorConfig
from ups.train import noise
from ups.train.ema import EMA
from ups.train.muon import Muon
from ups.train.run import Run, RunConfig
from ups.train.schedule import up_and_down
from ups.train.step import Backward, Captured, compile_model, fused


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    # data
    stride_x: int = 1           # take every n-th grid point
    stride_t: int = 1           # take every n-th frame
    codec: str = "patch"        # patch: closed form, fitted here; grid: learned by train_codec.py
    patch: tuple[int, ...] = (4,)  # grid points per token and axis (of each task)
    components: str = "auto"    # latent channels per token: a number, all, or auto
    codec_error: float = 1e-4   # nRMSE that auto may lose
    cache_dtype: str = "float32"  # float32, float16 or bfloat16
    # model
    whiten: tuple[float, ...] = (0.5,)  # latents go in alike: 1, or as they count: 0 (of each task)
    fine: int = 0               # channels on points, for fronts: 32 (--patch 8 --components all)
    model: OperatorConfig = OperatorConfig()
    # optimisation
    steps: int = 3000           # optimizer steps
    batch_size: int = 32        # global: the number of processes does not change it
    shares: tuple[int, ...] = (1,)  # of each task in the batches: 2 1 has the first twice as often
    lr: float = 8e-3            # highest learning rate
    rms: float = 0.2            # size of the blocks' updates (Muon's) / lr
    momentum: float = 0.98      # of Muon; 0.95 is better below some 1000 steps
    weight_decay: float = 1e-5
    warmup: int = 100           # steps to the full learning rate, which then falls to zero
    grad_clip: float = 1.0      # largest norm of the gradient
    ema: float = 0.99           # decay of the averaged weights
    unroll: int = 1             # above 1: from 70 % of training on 2, 3, .. this many steps at once
    early: int = 8              # early frames come early / (frame + 1) times as often; 1: all alike
    noise: float = 0.8          # on the first frame / its change in the step
    fade: tuple[float, ...] = (0.01,)  # share of the noise that is left at the end (of each task)
    symmetry: bool = True       # random shifts; --codec patch: mirror images, sums of linear tasks
    power: float = 1.0          # of the relative error in the loss
    conserve: float = 0.0       # weight of the drift of conserved means, for tasks that have such
    # evaluation
    val_trajectories: int = 64  # of each task that a validation rolls out
    seed: int = 0               # of weights, batches, moves and noise

    def __post_init__(self):
        super().__post_init__()
        check(self, whiten=(0, 1), fine=(0, 1024), shares=(1, 100), rms=(1e-9, math.inf),
              momentum=(0, 0.99999), unroll=(1, math.inf), early=(1, math.inf), noise=(0, 10),
              fade=(1e-9, 1), power=(0.5, 4), conserve=(0, math.inf))
        self.model.of_tasks(len(self.tasks))
        for name in ("whiten", "shares", "fade"):
            each(f"--{name}", getattr(self, name), len(self.tasks))
        check_codec(self, self.fine)


def operator_loss(model, batch, tasks=(), conserve=0.0, power=1.0):
    """Relative error of the unrolled steps, 1 for persistence, their mean to a power: (B,).

    `mask` weighs the latent channels by their share of the norm of the field (zero where padded),
    so this is |u_hat - u| / |u - mean| over space, in units of a task's typical change in a step.
    """
    z, z_hat = augmented(batch, tasks)
    task = tasks[batch["task"]] if tasks else None
    loss = 0.0
    for i in range(1, batch["unroll"] + 1):
        z_hat = model(z_hat, batch["dt"], batch["cond"], batch["task"])
        loss = loss + relative_error(z_hat, z[:, i], batch["mask"])
        if conserve:
            u_hat, u0 = (task.decode(x) for x in (z_hat, z[:, 0]))
            loss = loss + conserve * drift(u_hat[:, None], u0, task.conserved)[:, 0]
    return (loss / (batch["unroll"] * (task.restless if task else 1.0))) ** power


@fused
def relative_error(z_hat, z, mask):
    error, size = ((mask * x**2).sum((1, 2)) for x in (z_hat - z, z))
    return (error / size.clamp(min=1e-6) + 1e-12).sqrt()  # smooth where nothing changes


def augmented(batch, tasks):
    """The window z (B, L + 1, N, D), moved, and its first latent with noise (B, N, D)."""
    z, length = batch["z"], batch["unroll"] + 1
    if z.shape[1] > length:  # a part of the window
        begin = batch["begin"].clamp(max=z.shape[1] - length)[:, None, None, None]
        z = z.take_along_dim(begin + torch.arange(length, device=z.device)[:, None, None], 1)
    if "move" in batch:
        z = tasks[batch["task"]].moved(z, *batch["move"].split((3, 3, 4), 1))
    if "noise" not in batch:
        return z, z[:, 0]
    return z, noise.disturbed(z[:, 0], z[:, 1], batch["mask"], batch["level"], batch["noise"],
                              tasks[batch["task"]].white)


def unroll_at(step, steps, longest):
    """Single steps at first, then from 70 % of training on 2, 3, .. steps at once."""
    ramp = (step / steps - 0.7) / 0.3
    return min(longest, max(1, 2 + math.floor(ramp * (longest - 1))))


def prepared(batch, cfg):
    """Add what depends on the step: the unroll, and random numbers, which the loss applies."""
    batch["unroll"] = unroll_at(batch["step"], cfg.steps, batch["z"].shape[1] - 1)
    draw = noise.uniform(batch, cfg, (7,), stream=1)
    if cfg.symmetry:  # shift, mirror and sum
        batch["move"] = torch.cat([draw[:, :6], noise.uniform(batch, cfg, (4,), stream=2)], 1)
    if cfg.noise:
        fade = each("--fade", cfg.fade, max(1, len(cfg.tasks)))[batch["task"]]
        batch["level"] = cfg.noise * fade ** (batch["step"] / cfg.steps) * draw[:, 6]
        batch["noise"] = noise.normal(batch, cfg, batch["z"].shape[2:], stream=0)
    return batch


def evaluate(accelerator, model, tasks, cfg):
    """Errors of each task in physical units, and their geometric mean: so all tasks count alike."""
    scores = {"val/nrmse_1": 1.0, "val/nrmse_rollout": 1.0}
    for index, task in enumerate(tasks):
        tables = measure(accelerator, model, task, index, "val", cfg.val_trajectories)
        for name, table in (("nrmse_1", "one_step"), ("nrmse_rollout", "operator")):
            error = tables[table].mean().item()
            scores[f"val/{name}"] *= error ** (1 / len(tasks))
            if len(tasks) > 1:
                scores[f"val/{task.name}/{name}"] = error
    return scores


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "operator") as run:
        if run.finished:
            return
        accelerator = run.accelerator

        # data
        latents = open_latents(accelerator, cfg, "train", cfg.unroll, shortest=1, early=cfg.early)
        sampler = StepSampler(latents.windows.sizes, cfg.batch_size, cfg.steps, cfg.seed,
                              cfg.shares)
        loader = DataLoader(latents.windows, batch_sampler=sampler, collate_fn=whole_batch,
                            **run.loader_options(latents.windows))

        # model
        whiten = each("--whiten", cfg.whiten, max(1, len(cfg.tasks)))
        specs = [task.seen_by(w, cfg.fine) for task, w in zip(latents.tasks, whiten, strict=True)]
        model = LatentOperator(cfg.model, specs, cfg.fine)
        if cfg.compile:
            compile_model(model, len(latents.tasks))
        lr = torch.tensor(cfg.lr, device=accelerator.device)  # a tensor, so that graphs follow it
        optimizer = Muon(model, model.hidden, lr, rms=cfg.rms, momentum=cfg.momentum,
                         slow=model.points, weight_decay=cfg.weight_decay, compile=run.graphs)
        scheduler = LambdaLR(optimizer, up_and_down(cfg.warmup, cfg.steps))

        # prepare
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader)
        ema = EMA(model, cfg.ema, compile=run.graphs)
        loss = partial(operator_loss, tasks=latents.tasks, conserve=cfg.conserve, power=cfg.power)
        backward = Backward(run, model, loss, cfg.micro_batch, graphs=run.graphs)
        run.resume(model=model, optimizer=optimizer, scheduler=scheduler, ema=ema, sampler=sampler,
                   backward=backward, lineage=latents.lineage)

        # train
        def update(task):  # what only other tasks use has no gradient and stays as it is
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        update = Captured(update, run.graphs)  # with --compile on CUDA one replay, else as it reads
        for batch in run.progress(loader):  # global batch k is a function of (seed, k) alone
            loss = backward(prepared(batch, cfg))  # same outcome on every rank
            grad_norm = update(batch["task"])
            scheduler.step()

            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm,
                         "train/lr": scheduler.get_last_lr()[0]})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = evaluate(accelerator, model, latents.tasks, cfg)
                run.log(scores)
                ema.keep_best(scores["val/nrmse_rollout"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export
        with ema.applied(model, best=True):
            run.export(model, {"model": dataclasses.asdict(cfg.model), "fine": cfg.fine,
                               "tasks": [dataclasses.asdict(spec) for spec in specs],
                               "fields": [task.fields.about for task in latents.tasks]})
            finish_operator(run, model, latents.tasks)


if __name__ == "__main__":
    command(main)
