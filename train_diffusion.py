"""Learn the distribution of the next state by diffusion:  p(z(t + dt) | z(t), dt, PDE parameters).

    accelerate launch train_diffusion.py                                          # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_diffusion.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_diffusion.py --compile

Follows train_operator.py in the same --run: it learns what the operator's step misses, on the
states of the data, in white coordinates (ups/models/generators.py). The same command again resumes.
Writes runs/NAME/diffusion/: metrics.jsonl, checkpoints/, model/, choices, test.json, ensemble.png.
"""

import copy
import math
from dataclasses import dataclass
from functools import partial

import torch

from ups.config import check, command, parse
from ups.eval.finish import finish_ensembles, validate_ensemble
from ups.latents import open_latents
from ups.models.body import BodyConfig
from ups.models.diffusion import denoising_loss, training_angle
from ups.models.generators import Diffusion
from ups.models.latent_operator import latest
from ups.stages import inherit, load_operator
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclass(frozen=True)
class Config(RunConfig):
    # data: tasks, strides and codec are the operator's
    # model
    model: BodyConfig = BodyConfig(depth=4)
    # optimisation
    steps: int = 600            # optimizer steps
    batch_size: int = 48        # rows of a step, over all processes together
    lr: float = 2e-3            # peak learning rate; a linear warm-up, then linear to zero
    weight_decay: float = 1e-2  # decoupled: weights shrink by lr * this in a step; 0 to 1
    warmup: int = 100           # steps over which the learning rate rises from zero
    grad_clip: float = 1.0      # largest norm of the gradient; a longer one is scaled down
    ema: float = 0.995          # decay, below 1, of the averaged weights: the ones that are used
    sigma_mean: float = -0.4    # mean of the logarithm of the noise levels that are trained
    sigma_std: float = 1.4      # standard deviation of it
    noise: float = 0.008        # on z0, at most, in units of |z1 - z0|; 0: none
    augment: bool = True        # shifts, mirror images and sums that the equation allows
    # evaluation
    members: int = 8            # of an ensemble
    calls: int = 8              # network calls that draw a member's step
    seed: int = 0               # of weights, batches, moves and noise

    def __post_init__(self):
        super().__post_init__()
        check(self, calls=(1, math.inf))


def diffusion_loss(model, batch, operator, law, tasks):
    """Error of denoising what the operator's step misses, in white coordinates: (B,)."""
    task, index = tasks[batch["task"]], batch["task"]
    z, inputs = task.augment(batch["z"], batch.get("move"), batch.get("inputs"))
    z0, z1 = z[:, :-1].squeeze(1), z[:, -1]     # (B, N, D) each; with a history z0 (B, H, N, D)
    given = dict(dt=batch["dt"], cond=batch["cond"], task=index,
                 inputs=inputs if inputs is None else inputs[:, 0])
    with torch.no_grad():
        z0 = z0 + task.noise(z0, z1, batch)
        z1_hat = operator(z0, **given)
        width = batch["x"].shape[-1]
        clean = law.whiten((z1 - z1_hat)[..., :width], z1_hat - latest(z0), index)
    net = partial(model, z0=latest(z0), z1_hat=z1_hat, **given)
    return denoising_loss(net, clean, batch["angle"], batch["x"],
                          weight=partial(law.energy, task=index))


def draw(batch, cfg, tasks):
    """Add this step's random numbers: functions of (seed, step, row), on any number of ranks."""
    batch, spec = noise.disturb(batch, cfg, batch["z"].shape[1] - 1), tasks[batch["task"]].spec
    batch["x"] = noise.normal(batch, cfg, math.prod(spec.tokens), spec.width, use="x")
    batch["angle"] = training_angle(noise.normal(batch, cfg, use="angle"), cfg.sigma_mean,
                                    cfg.sigma_std)
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "diffusion") as run:               # folder and its lock, Accelerator, signals
        if run.finished:
            return
        # data
        operator = load_operator(cfg.run)
        operator.model.to(run.accelerator.device)
        source = inherit(cfg, operator)
        fit = open_latents(run, source, "fit", history=operator.history)  # the operator knows none
        data = open_latents(run, source, "train", history=operator.history)
        loader = run.loader(data)                    # global batch k is a function of (seed, k)

        # model
        model = Diffusion(cfg.model, operator.model.tasks, operator.model, calls=cfg.calls)
        model.to(run.accelerator.device)
        law = copy.deepcopy(model.law)               # of what it misses on states it was trained on
        known = law.measure(operator.model, data.windows)
        missed = model.law.measure(operator.model, fit.windows)     # more, on others
        model, _ = run.compile(model), run.compile(operator.model)
        optimizer = Muon(model, cfg.lr, momentum=0.95, rms=0.4, weight_decay=cfg.weight_decay)
        model, optimizer, loader = run.accelerator.prepare(model, optimizer, loader)
        diffusion = run.accelerator.unwrap_model(model)
        ema = EMA(model, cfg.ema)
        backward = Backward(run, model, partial(diffusion_loss, operator=operator.model, law=law,
                                                tasks=data.tasks))
        run.resume(model, optimizer, ema, backward,
                   built_on=data.fingerprints | {"operator": operator.mark})

        @run.replay                                  # with --compile on a GPU: a CUDA graph
        def update():
            grad_norm = run.accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        # train
        if not run.step:                             # without training: what it has to beat
            scores = validate_ensemble(run, operator.model, diffusion, data.tasks)
            ema.keep_best(scores["val/crps_ratio"])
        for batch in run.progress(loader):
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(draw(batch, cfg, data.tasks))   # gradients; all ranks agree
            grad_norm = update()
            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = validate_ensemble(run, operator.model, diffusion, data.tasks)
                run.log(scores | {"fit/missed_ratio": sum(missed) / sum(known)})
                ema.keep_best(scores["val/crps_ratio"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export and test
        with ema.applied(model, best=True):
            run.export(model, {key: operator.config[key] for key in ("tasks", "fields")})
            finish_ensembles(run, operator, {"diffusion": diffusion}, data.tasks)


if __name__ == "__main__":
    command(main)
