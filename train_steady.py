"""Learn the steady field that belongs to given inputs,  p(u | v):  its mean, then what that leaves.

    accelerate launch train_steady.py                                             # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_steady.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_steady.py --compile

Stands alone: data, codec and latent cache are made where they are missing. The data must say
`steady`; without --data it is Darcy's equation. Run the same command again to resume. Writes
runs/NAME/steady/: metrics.jsonl, checkpoints/, model/ (best average by validation), test.json and
steady.png.
"""

import dataclasses
import functools
import math

import torch
import torch.nn.functional as F

from ups.config import UsageError, check, command, parse
from ups.eval.steady import calibrate, left_over, read, test_steady, validate_steady
from ups.latents import open_latents
from ups.models.body import BodyConfig
from ups.models.codec import CodecConfig
from ups.models.diffusion import denoising_loss, training_sigma
from ups.models.steady import SteadyPrior, errors
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import AdamW, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    # data
    stride_x: int = 1           # take every n-th grid point
    codec: CodecConfig = CodecConfig(patch=8)
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
    augment: bool = True        # shifts and mirror images that the equation allows
    seed: int = 0               # of weights, batches, moves and noise
    # evaluation
    members: int = 16           # of an ensemble
    calls: int = 8              # network calls per member, one of them for the mean
    val_trajectories: int = 64  # samples that a validation answers

    def __post_init__(self):
        if not self.data and not self.tasks:
            object.__setattr__(self, "tasks", ("darcy2d",))
        super().__post_init__()
        check(self, mean_share=(0, 1), slope=(0, math.inf), calls=(2, math.inf))

    @property
    def switch(self):
        """The step from which the mean is fixed."""
        return int(self.mean_share * self.steps)


def steady_loss(model, batch, task, prior, slope):
    """Relative errors (B,) of the mean and its slopes, or the error of denoising what it leaves."""
    z, tokens = task.augment(batch["z"][:, 1:], batch.get("move"), batch.get("inputs"))
    z, cond, v = z[:, 0], batch["cond"], None
    if tokens is not None:
        tokens = tokens[:, 0]
        v = task.codec.decode_inputs(tokens)
    size = prior.size(v, cond)
    if "noise" not in batch:
        p = prior.latent(model(cond, tokens), size)
        error, error_of_slopes = errors(task.codec.decode(p), task.codec.decode(z))
        return error + slope * error_of_slopes
    with torch.no_grad():
        clean = (prior.coordinates(z, size) - model(cond, tokens)) / prior.scale
    net = functools.partial(model, cond, tokens)
    return denoising_loss(net, clean, batch["sigma"], batch["noise"], weight=prior.scale**2)


def prepared(batch, cfg):
    """Add the random numbers of the step; the loss applies them, inside its graph."""
    if cfg.augment:  # a shift and mirrors; sums of solutions are none of these inputs
        batch["move"] = F.pad(noise.uniform(batch, cfg, 6, use="augment"), (0, 4))
    if batch["step"] >= cfg.switch and not cfg.dry_run:  # steps of the mean cost more
        batch["noise"] = noise.normal(batch, cfg, *batch["z"].shape[2:], use="noise")
        batch["sigma"] = training_sigma(noise.normal(batch, cfg, use="sigma"), cfg.sigma_mean,
                                        cfg.sigma_std)
    return batch


def course(step, cfg):
    """The share of the learning rate: up and down for the mean, and again for what it leaves."""
    if step <= cfg.switch:
        return warmup_then_linear(step, cfg.warmup, cfg.switch)
    return warmup_then_linear(step - cfg.switch, cfg.warmup, cfg.steps - cfg.switch)


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "steady") as run:
        if run.finished:
            return
        accelerator = run.accelerator

        # data
        latents = open_latents(run, cfg, "train")
        task = latents.tasks[0]
        if len(latents.tasks) > 1 or not task.facts.steady:
            raise UsageError(f"{' and '.join(task.name for task in latents.tasks)}: this stage "
                             "takes one data set whose facts say `steady`, such as darcy2d.")
        loader = run.loader(latents)

        # model
        prior = model = SteadyPrior(cfg.model, cfg.denoiser, task.spec, len(task.facts.inputs))
        u, v, cond = read(task, task.fields.split("train")[:512], accelerator.device)
        prior.to(accelerator.device).fit(task.encode(u), v, cond, task.encode(0 * u[:1])[0],
                                         task.codec.weight)
        run.compile(model)
        optimizer = AdamW(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay)

        # prepare
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ema = EMA(model, cfg.ema)
        loss = functools.partial(steady_loss, task=task, prior=prior, slope=cfg.slope)
        backward = Backward(run, model, loss)
        run.resume(model, optimizer, ema, backward, built_on=latents.fingerprints)

        # train
        @run.replay  # with --compile on a GPU: a CUDA graph for each value of `drawing`
        def update(drawing):  # either the mean or the denoiser has gradients
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        drawing = bool(prior.scale.any())  # a scale is known: what the mean leaves is learned
        for batch in run.progress(loader):  # global batch k is a function of (seed, k) alone
            batch = prepared(batch, cfg)
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
                    scores = validate_steady(run, prior, task, cfg.calls if drawing else 1)
                run.log(scores)
                ema.keep_best(scores["val/crps"] if drawing else math.inf)
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export
        with ema.applied(model, best=True):
            calibrate(accelerator, prior, task, cfg.members, cfg.calls)
            run.export(model, {"denoiser": dataclasses.asdict(cfg.denoiser), **latents.about})
            test_steady(run, prior, task)


if __name__ == "__main__":
    command(main)
