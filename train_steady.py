"""Learn the steady field that belongs to given inputs,  p(u | v):  its mean, then what that leaves.

    accelerate launch train_steady.py                                             # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_steady.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_steady.py --compile

The same command again resumes. The data must say `steady`; without --data it is Darcy's equation.
Writes runs/NAME/steady/: metrics.jsonl, checkpoints/, model/, test.json and steady.png.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial

import torch

from ups.config import UsageError, check, command, parse
from ups.eval.steady import calibrate, left_over, read, test_steady, validate_steady
from ups.latents import open_latents
from ups.models.body import BodyConfig
from ups.models.codec import CodecConfig
from ups.models.diffusion import denoising_loss, training_angle
from ups.models.steady import SteadyPrior, errors
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import AdamW, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclass(frozen=True)
class Config(RunConfig):
    # data
    stride_x: int = 1           # keep every n-th grid point
    codec: CodecConfig = CodecConfig(patch=8)
    # model
    model: BodyConfig = BodyConfig(depth=4, kernel=3)  # of the mean
    denoiser: BodyConfig = BodyConfig(dim=32, depth=3, kernel=3)  # the rest
    # optimisation
    steps: int = 4000           # optimizer steps
    batch_size: int = 8         # rows of a step, over all processes together
    lr: float = 6e-3            # peak learning rate, once for the mean and once for the rest
    weight_decay: float = 1e-5  # decoupled: weights shrink by lr * this in a step; 0 to 1
    warmup: int = 100           # steps over which the learning rate rises from zero
    grad_clip: float = 1.0      # largest norm of the gradient; a longer one is scaled down
    ema: float = 0.99           # decay, below 1, of the averaged weights: the ones that are used
    mean_share: float = 0.7     # of the steps, 0 to 1; the others are for what the mean leaves
    augment: bool = True        # shifts and mirror images that the equation allows
    # evaluation
    members: int = 16           # of an ensemble
    calls: int = 8              # network calls per member, one of them for the mean; 2 or more
    val_trajectories: int = 64  # samples that a validation answers
    seed: int = 0               # of weights, batches, moves and noise

    def __post_init__(self):
        if not self.data and not self.tasks:
            object.__setattr__(self, "tasks", ("darcy2d",))
        super().__post_init__()
        check(self, mean_share=(0, 1), calls=(2, math.inf))


def steady_loss(model, batch, task, prior):
    """Relative errors (B,) of the mean and its slopes, or the error of denoising what it leaves."""
    z, tokens = task.augment(batch["z"][:, 1:], batch.get("move"), batch.get("inputs"))
    z, cond = z[:, 0], batch["cond"]                                            # (B, N, D)
    tokens = None if tokens is None else tokens[:, 0]
    v = None if tokens is None else task.codec.decode_inputs(tokens)
    size = prior.size(v, cond)
    if "noise" not in batch:
        p = prior.latent(model(cond, tokens), size)
        return sum(errors(task.codec.decode(p), task.codec.decode(z)))
    with torch.no_grad():
        clean = (prior.coordinates(z, size) - model(cond, tokens)) / prior.scale
    net = partial(model, cond, tokens)
    return denoising_loss(net, clean, batch["angle"], batch["noise"], weight=prior.scale**2)


def draw(batch, cfg, switch):
    """Add this step's random numbers: functions of (seed, step, row), on any number of ranks."""
    if cfg.augment:  # shift and mirror; sums of solutions are none of these inputs
        batch["move"] = torch.nn.functional.pad(noise.uniform(batch, cfg, 6, use="augment"), (0, 4))
    if batch["step"] >= switch:
        batch["angle"] = training_angle(noise.normal(batch, cfg, use="angle"), -0.8, 1.4)
        batch["noise"] = noise.normal(batch, cfg, *batch["z"].shape[2:], use="noise")
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "steady") as run:                  # folder and its lock, Accelerator, signals
        if run.finished:
            return
        # data
        data = open_latents(run, cfg, "train")       # tasks, windows, fingerprints
        task, switch = data.tasks[0], int(cfg.mean_share * cfg.steps)  # then the mean is fixed
        if len(data.tasks) > 1 or not task.facts.steady:
            raise UsageError(f"{' '.join(cfg.tasks or cfg.data)}: this stage takes one data set "
                             "whose facts say `steady`, such as darcy2d.")
        loader = run.loader(data)                    # global batch k is a function of (seed, k)

        # model
        prior = SteadyPrior(cfg.model, cfg.denoiser, task.spec, len(task.facts.inputs))
        u, v, cond = read(task, task.fields.split("train")[:512], run.accelerator.device)
        model = run.compile(prior.to(u.device))
        prior.fit(task.encode(u), v, cond, task.encode(0 * u[:1])[0], task.codec.weight)
        optimizer = AdamW(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay)
        model, optimizer, loader = run.accelerator.prepare(model, optimizer, loader)
        ema = EMA(model, cfg.ema)
        backward = Backward(run, model, partial(steady_loss, task=task, prior=prior))
        run.resume(model, optimizer, ema, backward, built_on=data.fingerprints)

        @run.replay                                  # with --compile on a GPU: two CUDA graphs
        def update(drawing):                         # either the mean or the rest has gradients
            grad_norm = run.accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        # train
        drawing = bool(prior.scale.any())            # a scale is known: the rest is learned
        for batch in run.progress(loader):
            batch = draw(batch, cfg, math.inf if cfg.dry_run else switch)  # the mean costs more
            if "noise" in batch and not drawing:
                with ema.applied(model):
                    prior.scale.copy_(left_over(prior, task))
                drawing = True
            first, last = (0, switch) if run.step <= switch else (switch, cfg.steps)
            share = warmup_then_linear(run.step - first, cfg.warmup, last - first)
            lr = set_lr(optimizer, cfg.lr * share)
            loss = backward(batch)                   # gradients; all ranks agree on the outcome
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

        # export and test
        with ema.applied(model, best=True):
            calibrate(prior, task, cfg.members, cfg.calls)
            run.export(model, {"denoiser": asdict(cfg.denoiser), **data.about})
            test_steady(run, prior, task)


if __name__ == "__main__":
    command(main)
