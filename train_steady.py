"""Learn the steady field of a coefficient,  p(u | a):  first its mean, then what that leaves.

    accelerate launch train_steady.py                                             # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_steady.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_steady.py --compile

Stands alone: data, codec and latent cache are made where they are missing. Run the same command
again to resume. Writes runs/NAME/steady/: metrics.jsonl, checkpoints/, model/ (best average by
validation), test.json and steady.png.
"""

import dataclasses
import functools
import math

import torch
from torch.utils.data import DataLoader

from ups.cache.sampler import StepSampler
from ups.cache.windows import whole_batch
from ups.config import UsageError, check, command, parse
from ups.eval.steady import calibrate, finish_steady, measure_steady, summary
from ups.latents import check_codec, open_latents
from ups.models.body import BodyConfig
from ups.models.diffusion import denoising_loss, training_sigma
from ups.models.steady import SteadyPrior, orientations, relative, size_of, slopes, turned
from ups.steady import check_steady, differences, left_over, operator_beside
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import AdamW, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward, Captured, compile_model


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    run: str = "runs/darcy2d"   # folder of the run; each stage has a folder in it
    # data
    tasks: tuple[str, ...] = ("darcy2d",)  # one steady task; some files of it: darcy2d:beta=0.1,1
    stride_x: int = 1           # take every n-th grid point
    stride_t: int = 1           # the two frames of a steady task are always taken
    codec: str = "patch"        # patch: closed form, fitted here; grid: learned by train_codec.py
    patch: int = 8              # grid points per token and axis
    components: str = "auto"    # latent channels per token: a number, all, or auto
    codec_error: float = 1e-4   # nRMSE that auto, and the coordinates of u, may lose
    cache_dtype: str = "float32"  # float32, float16 or bfloat16
    # model
    model: BodyConfig = BodyConfig(depth=4, kernel=3, norm="layer")  # of the mean
    denoiser: BodyConfig = BodyConfig(dim=32, depth=3, kernel=3, norm="layer")  # the rest
    # optimisation
    steps: int = 4000           # optimizer steps
    batch_size: int = 8         # global: the number of processes does not change it
    lr: float = 6e-3            # highest learning rate
    weight_decay: float = 1e-5
    warmup: int = 100           # steps to the full learning rate, which then falls to zero
    grad_clip: float = 1.0      # largest norm of the gradient
    ema: float = 0.99           # decay of the averaged weights
    mean_share: float = 0.7     # of the steps; the others are for what the mean leaves
    slope: float = 1.0          # weight of the error of the mean's slopes beside its own
    sigma_mean: float = -0.8    # of the logarithm of the noise levels that are trained
    sigma_std: float = 1.4
    turn: bool = True           # random reflections and transposes
    seed: int = 0               # of weights, batches, turns and noise
    # evaluation
    members: int = 16           # of an ensemble
    calls: int = 8              # network calls per member, one of them for the mean
    table: tuple[int, ...] = (2, 4, 8, 16)  # numbers of calls that are compared at the end
    refine: int = 4             # iterations of the solver that polish the mean
    operator: str = ""          # run whose operator stands beside; empty: that of this run, if any
    val_trajectories: int = 64  # that a validation answers

    def __post_init__(self):
        super().__post_init__()
        check(self, mean_share=(0, 1), slope=(0, math.inf), calls=(2, math.inf), refine=(0, 1000))
        check_codec(self)
        if min(self.table, default=0) < 1:
            raise UsageError("--table takes numbers of network calls of at least 1.")

    @property
    def switch(self):
        """The step from which the mean is fixed."""
        return int(self.mean_share * self.steps)


def steady_loss(model, batch, task, prior, slope):
    """Relative errors (B,) of the mean and of its slopes, or the error of denoising what it leaves.

    Slopes tell the mean to be continuous from patch to patch, and count where the equation does.
    """
    u = task.codec.decode(batch["z"].flatten(0, 1)).unflatten(0, (-1, 2))  # (a, 0) and (a, u)
    if "turn" in batch:
        u = turned(u, batch["turn"])
    z0, z1 = task.codec.encode(u.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)  # (B, N, D)
    cond, size = batch["cond"], size_of(u[:, 0, 0], batch["cond"])
    if "noise" not in batch:
        p, y = task.codec.decode(prior.latent(z0, model(z0, cond), size))[:, 1], u[:, 1, 1]
        return relative(p, y) + slope * relative(slopes(p), slopes(y))
    with torch.no_grad():
        clean = prior.scaled(prior.coordinates(z0, z1, size) - model(z0, cond))
    own = prior.scale > 0
    return denoising_loss(functools.partial(model, z0, cond), clean, batch["sigma"],
                          own * batch["noise"], weight=prior.scale**2)


def prepared(batch, cfg, task):
    """Add the random numbers of the step; the loss applies them, inside its graph."""
    draw = noise.uniform(batch, cfg, (), stream=1)
    if cfg.turn:
        batch["turn"] = (draw * orientations(task.codec.grid)).long()
    if batch["step"] >= cfg.switch and not cfg.dry_run:  # steps of the mean cost more
        batch["noise"] = noise.normal(batch, cfg, batch["z"].shape[2:], stream=0)
        batch["sigma"] = training_sigma(noise.normal(batch, cfg, (), stream=2), cfg.sigma_mean,
                                        cfg.sigma_std)
    return batch


def course(step, cfg):
    """The share of the learning rate: up and down for the mean, and again for what it leaves."""
    if step <= cfg.switch:
        return warmup_then_linear(step, cfg.warmup, cfg.switch)
    return warmup_then_linear(step - cfg.switch, cfg.warmup, cfg.steps - cfg.switch)


def evaluate(accelerator, prior, task, cfg, calls):
    """Validation scores in physical units; with one call they are those of the mean."""
    tables = measure_steady(accelerator, prior, task, "val", cfg.members, calls,
                            cfg.val_trajectories)
    scores = summary(tables, cfg.members)
    names = {"nrmse": "nrmse_members", "nrmse_sample": "nrmse_sample", "crps": "crps"}
    names |= {"spread_skill": "spread_skill"} if calls > 1 else {}
    return {f"val/{name}": scores[key] for name, key in names.items()}


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "steady") as run:
        if run.finished:
            return
        accelerator = run.accelerator

        # data
        operator = operator_beside(accelerator, cfg)
        latents = open_latents(accelerator, cfg, "train")
        check_steady(latents.tasks)
        (task,) = latents.tasks
        sampler = StepSampler(latents.windows.sizes, cfg.batch_size, cfg.steps, cfg.seed)
        loader = DataLoader(latents.windows, batch_sampler=sampler, collate_fn=whole_batch,
                            **run.loader_options(latents.windows))

        # model
        prior = model = SteadyPrior(cfg.model, cfg.denoiser, task.spec).to(accelerator.device)
        prior.fit(differences(latents.windows, task), task.codec.weight, cfg.codec_error)
        if cfg.compile:
            compile_model(model)
        optimizer = AdamW(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay)

        # prepare
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ema = EMA(model, cfg.ema, compile=run.graphs)
        loss = functools.partial(steady_loss, task=task, prior=prior, slope=cfg.slope)
        backward = Backward(run, model, loss, cfg.micro_batch, graphs=run.graphs)
        run.resume(model=model, optimizer=optimizer, ema=ema, sampler=sampler, backward=backward,
                   lineage=latents.lineage)

        # train
        def update(drawing):  # either the mean or the denoiser has gradients
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        update = Captured(update, run.graphs)  # with --compile on CUDA one replay, else as it reads
        drawing = bool(prior.scale.any())  # a scale is known: what the mean leaves is learned
        for batch in run.progress(loader):  # global batch k is a function of (seed, k) alone
            batch = prepared(batch, cfg, task)
            if "noise" in batch and not drawing:  # from here on the mean is fixed
                with ema.applied(model):
                    prior.scale.copy_(left_over(prior, task))
                drawing = True
            lr = set_lr(optimizer, cfg.lr * course(run.step, cfg))
            loss = backward(batch)  # same outcome on every rank
            grad_norm = update(drawing)

            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = evaluate(accelerator, prior, task, cfg, cfg.calls if drawing else 1)
                run.log(scores)
                ema.keep_best(scores["val/crps"] if drawing else math.inf)
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export
        with ema.applied(model, best=True):
            calibrate(accelerator, prior, task, cfg.members, cfg.calls)
            run.export(model, {"model": dataclasses.asdict(cfg.model),
                               "denoiser": dataclasses.asdict(cfg.denoiser),
                               "tasks": [dataclasses.asdict(task.spec)],
                               "fields": [task.fields.about]})
            finish_steady(run, prior, task, operator)


if __name__ == "__main__":
    command(main)
