"""Learn to draw the next state in one call:  z(t), dt, PDE parameters, noise -> z(t + dt).

    accelerate launch train_ensemble.py                                           # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_ensemble.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_ensemble.py --compile

Follows train_operator.py in the same --run: the operator, with noise, goes on training by the fair
CRPS of a few members; without noise it must stay as good as it was (the anchor). The same command
again resumes. Writes runs/NAME/ensemble/: metrics.jsonl, checkpoints/, model/, choices.json,
test.json and ensemble.png.
"""

import math
from dataclasses import dataclass
from functools import partial

from ups.config import check, command, parse
from ups.eval.finish import finish_ensembles, validate_ensemble
from ups.latents import open_latents
from ups.models.body import BodyConfig
from ups.models.generators import Ensemble, Perturbed, fair_crps
from ups.rollout import moved_on
from ups.stages import inherit, load_operator
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclass(frozen=True)
class Config(RunConfig):
    # data: tasks, strides and codec are the operator's
    length: int = 1             # steps of the roll-outs in training
    # optimisation; the model's sizes are the operator's
    steps: int = 600            # optimizer steps
    batch_size: int = 16        # rows of a step, over all processes together
    draws: int = 4              # members of a row; 1: a control, with neither noise nor spread
    anchor: float = 0.3         # weight of the error without noise beside the CRPS
    lr: float = 5e-4            # peak learning rate; a linear warm-up, then linear to zero
    weight_decay: float = 1e-5  # decoupled: weights shrink by lr * this in a step; 0 to 1
    warmup: int = 100           # steps over which the learning rate rises from zero
    grad_clip: float = 1.0      # largest norm of the gradient; a longer one is scaled down
    ema: float = 0.99           # decay, below 1, of the averaged weights: the ones that are used
    noise: float = 0.008        # on z0, at most, in units of |z1 - z0|; 0: none
    augment: bool = True        # shifts, mirror images and sums that the equation allows
    # evaluation
    members: int = 8            # of an ensemble
    seed: int = 0               # of weights, batches, moves and noise

    def __post_init__(self):
        super().__post_init__()
        check(self, anchor=(0, math.inf))


def ensemble_loss(model, batch, law, tasks, anchor):
    """Fair CRPS of a roll-out's members, and the relative error of one without noise: (B,)."""
    task, (vector, field) = tasks[batch["task"]], (batch["vector"], batch["field"])
    z, inputs = task.augment(batch["z"], batch.get("move"), batch.get("inputs"))
    (steps, members), loss = vector.shape[1:3], 0.0          # (B, L, M, ..); the last has no noise
    start, ends = z[:, :-steps].squeeze(1), z[:, -steps:].unbind(1)
    start = start + task.noise(start, ends[0], batch)
    state, dt, cond = (x.repeat_interleave(members, 0) for x in (start, batch["dt"], batch["cond"]))
    for k, z1 in enumerate(ends):
        given = inputs if inputs is None else inputs[:, k].repeat_interleave(members, 0)
        end = model(state, dt, cond, batch["task"], given, vector[:, k].flatten(0, 1),
                    field[:, k].flatten(0, 1))
        state, z1_hat = moved_on(state, end), end.unflatten(0, (-1, members))    # (B, M, N, D)
        loss = loss + anchor * task.relative_error(z1_hat[:, -1], z1)
        loss = loss + fair_crps(z1_hat[:, :-1], z1, task, law, batch["task"])
    return loss / steps / task.typical_change[batch["stride"]]


def draw(batch, cfg, ensemble):
    """Add this step's random numbers: functions of (seed, step, row), on any number of ranks."""
    (rows, frames), task, seen = batch["z"].shape[:2], batch["task"], ensemble.history
    batch = noise.disturb(batch, cfg, seen)
    shape = frames - seen, cfg.draws + 1, ensemble.numbers(task)
    numbers = noise.normal(batch, cfg, *shape, use="members")
    numbers[:, :, -1 if cfg.draws > 1 else None:] = 0        # the anchor; of a control, all
    parts = ensemble.shaped(numbers.flatten(0, 2), task)
    batch["vector"], batch["field"] = (x.unflatten(0, (rows, *shape[:2])) for x in parts)
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "ensemble") as run:                # folder and its lock, Accelerator, signals
        if run.finished:
            return
        # data
        operator = load_operator(cfg.run)
        operator.model.to(run.accelerator.device)
        source = inherit(cfg, operator)
        seen = operator.history                      # frames that the operator sees
        fit = open_latents(run, source, "fit", history=seen)  # trajectories that it does not know
        data = open_latents(run, source, "train", length=cfg.length, history=seen)
        loader = run.loader(data)                    # global batch k is a function of (seed, k)

        # model
        sizes = BodyConfig(**operator.config["model"])
        model = Ensemble(sizes, operator.model.tasks).to(run.accelerator.device)
        model.load_state_dict(operator.model.state_dict(), strict=False)
        model.law.measure(operator.model, fit.windows)
        model = run.compile(model)
        optimizer = Muon(model, cfg.lr, weight_decay=cfg.weight_decay)  # AdamW for the rest
        model, optimizer, loader = run.accelerator.prepare(model, optimizer, loader)
        ensemble = run.accelerator.unwrap_model(model)
        generator = ensemble if cfg.draws > 1 else Perturbed(ensemble, None)    # the control
        ema = EMA(model, cfg.ema)
        backward = Backward(run, model, partial(ensemble_loss, law=ensemble.law, tasks=data.tasks,
                                                anchor=cfg.anchor))
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
            scores = validate_ensemble(run, operator.model, generator, data.tasks)
            ema.keep_best(scores["val/crps_ratio"])
        for batch in run.progress(loader):
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(draw(batch, cfg, ensemble))  # gradients; all ranks agree
            grad_norm = update()
            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = validate_ensemble(run, operator.model, generator, data.tasks)
                run.log(scores)
                ema.keep_best(scores["val/crps_ratio"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export and test
        with ema.applied(model, best=True):
            run.export(model, {key: operator.config[key] for key in ("model", "tasks", "fields")})
            finish_ensembles(run, operator, {"ensemble": generator}, data.tasks)


if __name__ == "__main__":
    command(main)
