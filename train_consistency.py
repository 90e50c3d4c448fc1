"""Learn to draw a diffusion's next state in one or two calls:  noise | z(t), .. -> z(t + dt).

    accelerate launch train_consistency.py                                        # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_consistency.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_consistency.py --compile

Follows train_diffusion.py in the same --run: its model is the teacher, and the student starts from
its weights. The same command again resumes. Writes runs/NAME/consistency/: metrics.jsonl,
checkpoints/, model/, choices.json, test.json and ensemble.png.
"""

import copy
import math
from dataclasses import dataclass
from functools import partial

import torch

from ups.config import check, command, parse
from ups.eval.finish import finish_ensembles, validate_ensemble
from ups.latents import open_latents
from ups.models.diffusion import distillation_loss
from ups.models.generators import JUMPS, LADDER
from ups.models.latent_operator import latest
from ups.stages import inherit, load_generator, load_operator
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclass(frozen=True)
class Config(RunConfig):
    # data: tasks, strides and codec are the operator's
    # optimisation; the model's sizes are the teacher's
    steps: int = 400            # optimizer steps
    batch_size: int = 32        # rows of a step, over all processes together
    lr: float = 1e-3            # peak learning rate; a linear warm-up, then linear to zero
    weight_decay: float = 1e-5  # decoupled: weights shrink by lr * this in a step; 0 to 1
    warmup: int = 100           # steps over which the learning rate rises from zero
    grad_clip: float = 1.0      # largest norm of the gradient; a longer one is scaled down
    ema: float = 0.995          # decay, below 1, of the averaged weights: the ones that are used
    noise: float = 0.008        # on z0, at most, in units of |z1 - z0|; 0: none
    augment: bool = True        # shifts, mirror images and sums that the equation allows
    # evaluation
    members: int = 8            # of an ensemble
    calls: int = 2              # network calls that draw a member's step: 1 or 2
    seed: int = 0               # of weights, batches, moves and noise

    def __post_init__(self):
        super().__post_init__()
        check(self, calls=(1, 2))


def student_loss(model, batch, teacher, tasks):
    """Distance of the student's jumps to the end of the teacher's trajectory: (B,)."""
    task, index = tasks[batch["task"]], batch["task"]
    z, inputs = task.augment(batch["z"], batch.get("move"), batch.get("inputs"))
    z0, z1 = z[:, :-1].squeeze(1), z[:, -1]     # (B, N, D) each; with a history z0 (B, H, N, D)
    given = dict(dt=batch["dt"], cond=batch["cond"], task=index,
                 inputs=inputs if inputs is None else inputs[:, 0])
    with torch.no_grad():
        z0 = z0 + task.noise(z0, z1, batch)
        given |= dict(z1_hat=teacher.operator[0](z0, **given), z0=latest(z0))
    return distillation_loss(partial(model, **given), partial(teacher, **given), batch["x"], LADDER,
                             JUMPS, weight=partial(teacher.law.energy, task=index))


def draw(batch, cfg, tasks):
    """Add this step's random numbers: functions of (seed, step, row), on any number of ranks."""
    batch, spec = noise.disturb(batch, cfg, batch["z"].shape[1] - 1), tasks[batch["task"]].spec
    batch["x"] = noise.normal(batch, cfg, math.prod(spec.tokens), spec.width, use="x")
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "consistency") as run:             # folder and its lock, Accelerator, signals
        if run.finished:
            return
        # data
        operator = load_operator(cfg.run)
        teacher = load_generator(cfg.run, "diffusion", operator)
        for frozen in (operator.model, teacher.model):
            frozen.to(run.accelerator.device)
        data = open_latents(run, inherit(cfg, operator), "train", history=operator.history)
        loader = run.loader(data)                    # global batch k is a function of (seed, k)

        # model
        model = copy.deepcopy(teacher.model).requires_grad_(True)
        model.operator, model.kind, model.calls = (operator.model,), "consistency", cfg.calls
        for part in (model, teacher.model, operator.model):
            run.compile(part)
        optimizer = Muon(model, cfg.lr, momentum=0.95, rms=0.4, weight_decay=cfg.weight_decay)
        model, optimizer, loader = run.accelerator.prepare(model, optimizer, loader)
        student = run.accelerator.unwrap_model(model)
        ema = EMA(model, cfg.ema)
        backward = Backward(run, model, partial(student_loss, teacher=teacher.model,
                                                tasks=data.tasks))
        run.resume(model, optimizer, ema, backward, built_on=data.fingerprints | {
            "operator": operator.mark, "diffusion": teacher.mark})

        @run.replay                                  # with --compile on a GPU: a CUDA graph
        def update():
            grad_norm = run.accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        # train
        if not run.step:                             # without training: what it has to beat
            scores = validate_ensemble(run, operator.model, student, data.tasks)
            ema.keep_best(scores["val/crps_ratio"])
        for batch in run.progress(loader):
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(draw(batch, cfg, data.tasks))   # gradients; all ranks agree
            grad_norm = update()
            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = validate_ensemble(run, operator.model, student, data.tasks)
                run.log(scores)
                ema.keep_best(scores["val/crps_ratio"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export and test
        with ema.applied(model, best=True):
            run.export(model, {key: teacher.config[key] for key in ("model", "tasks", "fields")})
            finish_ensembles(run, operator, {"diffusion": teacher.model, "consistency": student},
                             data.tasks)


if __name__ == "__main__":
    command(main)
