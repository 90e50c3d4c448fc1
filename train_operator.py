"""Learn the latent time step  z(t), dt, parameters -> z(t + dt)  of one or several PDEs.

    accelerate launch train_operator.py                                           # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_operator.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_operator.py --compile

Run the same command again to resume. Data, codec and latent cache are made where they are missing.
Writes into runs/NAME/operator/: metrics.jsonl, checkpoints/, model/, test.json and rollout.png.
"""

import dataclasses
from functools import partial

import torch
from torch.utils.data import DataLoader

from ups.cache.sampler import StepSampler
from ups.cache.windows import whole_batch
from ups.config import check, command, parse
from ups.eval.finish import test_operator, validate
from ups.latents import check_codec, open_latents
from ups.models.latent_operator import LatentOperator, OperatorConfig
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward, Captured, compile_model


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    # data
    stride_x: int = 1           # take every n-th grid point
    stride_t: int = 1           # take every n-th frame
    codec: str = "patch"        # patch: closed form, fitted here; grid: learned by train_codec.py
    patch: int = 4              # grid points per token and axis
    components: str = "auto"    # latent channels per token: a number, all, or auto
    codec_error: float = 1e-4   # nRMSE that auto may lose
    cache_dtype: str = "float32"  # float32, float16 or bfloat16
    # model
    model: OperatorConfig = OperatorConfig()
    # optimisation
    steps: int = 3000           # optimizer steps
    batch_size: int = 32        # global: the number of processes does not change it
    lr: float = 8e-3            # peak; linear warm-up, then linear to zero
    weight_decay: float = 1e-5
    warmup: int = 100           # steps
    grad_clip: float = 1.0      # largest norm of the gradient
    ema: float = 0.99           # decay of the averaged weights, which are validated and exported
    noise: float = 0.8          # on z0 at the first step, in units of |z1 - z0|
    noise_end: float = 0.008    # the same at the last step
    augment: bool = True        # shifts, mirror images and sums that the equation allows
    # evaluation
    val_trajectories: int = 64  # of each task that a validation rolls out
    seed: int = 0               # of weights, batches, moves and noise

    def __post_init__(self):
        super().__post_init__()
        check(self, noise=(0, 10), noise_end=(0, 10))
        check_codec(self)


def operator_loss(model, batch, tasks):
    """Relative error of one step; 1 means "no better than no change": (B,)."""
    task, inputs = tasks[batch["task"]], batch.get("inputs")
    z, inputs = task.augment(batch["z"], batch.get("move"), inputs)
    z0, z1 = z.unbind(1)                                                        # (B, N, D) each
    inputs = inputs if inputs is None else inputs[:, 0]                         # at z0
    start = z0 + task.noise(z0, z1, batch)
    z1_hat = model(start, batch["dt"], batch["cond"], batch["task"], inputs)
    return task.relative_error(z1_hat, z1) / task.typical_change


def prepared(batch, cfg):
    """Add the random numbers of the step, which the loss applies."""
    draw = noise.uniform(batch, cfg, (7,), stream=1)
    if cfg.augment:  # shift, mirror and sum
        batch["move"] = torch.cat([draw[:, :6], noise.uniform(batch, cfg, (4,), stream=2)], 1)
    if cfg.noise:
        decay = (cfg.noise_end / cfg.noise) ** (batch["step"] / cfg.steps)
        batch["level"] = cfg.noise * decay * draw[:, 6]
        batch["noise"] = noise.normal(batch, cfg, batch["z"].shape[2:], stream=0)
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "operator") as run:
        if run.finished:
            return
        accelerator = run.accelerator

        # data
        latents = open_latents(accelerator, cfg, "train")
        sampler = StepSampler(latents.windows.sizes, cfg.batch_size, cfg.steps, cfg.seed)
        loader = DataLoader(latents.windows, batch_sampler=sampler, collate_fn=whole_batch,
                            **run.loader_options(latents.windows))

        # model
        specs = [task.spec for task in latents.tasks]
        model = LatentOperator(cfg.model, specs)
        if cfg.compile:
            compile_model(model, len(latents.tasks))
        optimizer = Muon(model, cfg.lr, weight_decay=cfg.weight_decay)

        # prepare
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ema = EMA(model, cfg.ema, compile=run.graphs)
        loss = partial(operator_loss, tasks=latents.tasks)
        backward = Backward(run, model, loss, cfg.micro_batch, graphs=run.graphs)
        run.resume(model=model, optimizer=optimizer, ema=ema, sampler=sampler, backward=backward,
                   lineage=latents.lineage)

        # train
        def update(task):  # what only other tasks use has no gradient and stays as it is
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        update = Captured(update, run.graphs)  # with --compile on CUDA one replay, else as it reads
        for batch in run.progress(loader):  # global batch k is a function of (seed, k) alone
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(prepared(batch, cfg))  # same outcome on every rank
            grad_norm = update(batch["task"])

            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = validate(run, model, latents.tasks)
                run.log(scores)
                ema.keep_best(scores["val/nrmse_rollout"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export
        with ema.applied(model, best=True):
            run.export(model, {"model": dataclasses.asdict(cfg.model),
                               "tasks": [dataclasses.asdict(spec) for spec in specs],
                               "fields": [task.fields.about for task in latents.tasks]})
            test_operator(run, model, latents.tasks)


if __name__ == "__main__":
    command(main)
