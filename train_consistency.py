"""Learn the corrector's sampler in one or two network calls:  noise | z0, z1_hat -> z1 - z1_hat.

    accelerate launch train_consistency.py                                        # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_consistency.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_consistency.py --compile

Follows train_diffusion.py in the same --run: its corrector is the teacher, and the student starts
from its weights. Run the same command again to resume. Writes runs/NAME/consistency/:
metrics.jsonl, checkpoints/, model/, test.json and ensemble.png.
"""

import copy
import dataclasses
import functools
import math

from ups.config import check, command, parse
from ups.eval.ensemble_scores import finish_ensembles, val_ratio
from ups.latents import open_latents
from ups.models.diffusion import consistency, denoise, distillation_loss
from ups.models.generators import JUMPS, LADDER
from ups.residuals import Residuals
from ups.stages import inherit, load_corrector, load_operator
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    # data: tasks, strides and codec are the operator's
    start_every: int = 10       # roll-outs of the operator start at every n-th frame
    # optimisation; the model's sizes are the teacher's
    steps: int = 500            # optimizer steps
    batch_size: int = 32        # global: the number of processes does not change it
    lr: float = 1e-3            # highest learning rate
    weight_decay: float = 1e-5
    warmup: int = 100           # steps to the full learning rate, which then falls to zero
    grad_clip: float = 1.0      # largest norm of the gradient
    ema: float = 0.995          # decay of the averaged weights
    shift: bool = True          # random circular shifts of periodic tasks
    seed: int = 0               # of weights, batches, shifts and noise
    # evaluation
    members: int = 16           # of an ensemble
    calls: int = 2              # network calls that draw a member: 1 or 2
    correct_every: int = 1      # steps of the operator between two corrections

    def __post_init__(self):
        super().__post_init__()
        check(self, calls=(1, 2))


def student_loss(model, batch, teacher, tasks):
    """Distance (B,) of the student's jumps to the end of the teacher's trajectory."""
    task, inputs = tasks[batch["task"]], batch.get("inputs")
    z, inputs = task.augment(batch["z"][:, :2], batch.get("shift"), inputs)  # without the truth
    z0, z1_hat = z.unbind(1)  # (B, N, D)
    given = dict(z0=z0, z1_hat=z1_hat, lead=batch["lead"], dt=batch["dt"], cond=batch["cond"],
                 task=batch["task"], inputs=inputs if inputs is None else inputs[:, 0])
    student = functools.partial(consistency, functools.partial(model, **given))
    denoiser = functools.partial(denoise, functools.partial(teacher, **given))
    return distillation_loss(student, denoiser, LADDER[0] * batch["noise"], LADDER, JUMPS,
                             weight=task.valid)


def prepared(batch, cfg, tasks):
    """Add the random numbers of the step; the loss applies them, inside its graph."""
    if cfg.shift:
        batch["shift"] = noise.uniform(batch, cfg, 3, use="augment")  # share of each axis
    normal = noise.normal(batch, cfg, *batch["z"].shape[2:], use="noise")
    batch["noise"] = tasks[batch["task"]].valid * normal
    return batch


def evaluate(accelerator, operator, student, tasks, cfg):
    """Validation CRPS, for each task, as a share of the operator's absolute error."""
    scores = {"val/crps_ratio": 0.0}
    for index, task in enumerate(tasks):
        ratio = val_ratio(accelerator, operator, task, index, student, cfg)
        scores["val/crps_ratio"] += ratio / len(tasks)
        if len(tasks) > 1:
            scores[f"val/{task.name}/crps_ratio"] = ratio
    return scores


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "consistency") as run:
        if run.finished:
            return
        accelerator = run.accelerator

        # data
        operator = load_operator(cfg.run)
        teacher = load_corrector(cfg.run, "diffusion", operator)
        for frozen in (operator.model, teacher.model):
            frozen.to(accelerator.device)
        latents = open_latents(run, inherit(cfg, operator), "fit", length=math.inf)
        residuals = Residuals(operator.model, latents.windows, accelerator.device, cfg.start_every)
        loader = run.loader(residuals)

        # model
        model = copy.deepcopy(teacher.model).requires_grad_(True)
        model.kind = "consistency"
        run.compile(model)
        run.compile(teacher.model)
        optimizer = Muon(model, cfg.lr, momentum=0.95, rms=0.4, weight_decay=cfg.weight_decay)

        # prepare
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        student = accelerator.unwrap_model(model)  # draws members with the weights of `model`
        ema = EMA(model, cfg.ema)
        loss = functools.partial(student_loss, teacher=teacher.model, tasks=latents.tasks)
        backward = Backward(run, model, loss)
        run.resume(model, optimizer, ema, backward, built_on=latents.fingerprints | {
            "operator": operator.mark, "diffusion": teacher.mark})

        # train
        @run.replay  # with --compile on a GPU: a CUDA graph
        def update():
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        for batch in run.progress(loader):  # global batch k is a function of (seed, k) alone
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(prepared(batch, cfg, latents.tasks))
            grad_norm = update()

            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = evaluate(accelerator, operator.model, student, latents.tasks, cfg)
                run.log(scores)
                ema.keep_best(scores["val/crps_ratio"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export
        with ema.applied(model, best=True):
            run.export(model, {key: teacher.config[key] for key in ("model", "tasks", "tables")})
            calls = teacher.settings.calls
            correctors = {f"diffusion, {calls} calls": (teacher.model, calls),
                          "student, 1 call": (student, 1), "student, 2 calls": (student, 2)}
            finish_ensembles(run, operator.model, correctors, latents.tasks)


if __name__ == "__main__":
    command(main)
