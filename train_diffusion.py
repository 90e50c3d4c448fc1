"""Learn what the operator misses:  p(z1 - z1_hat | z0, z1_hat, time since the last true state).

    accelerate launch train_diffusion.py                                          # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_diffusion.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_diffusion.py --compile

Follows train_operator.py in the same --run, on trajectories that the operator did not train on (the
fit split) and on the states of its own roll-outs. Run the same command again to resume. Writes
runs/NAME/diffusion/: metrics.jsonl, checkpoints/, model/, test.json and ensemble.png.
"""

import dataclasses
import functools
import math

from ups.config import check, command, parse
from ups.eval.ensemble_scores import finish_ensembles, val_ratio
from ups.latents import open_latents
from ups.models.body import BodyConfig
from ups.models.diffusion import denoising_loss, training_sigma
from ups.models.generators import Corrector, compress
from ups.residuals import Residuals
from ups.stages import inherit, load_operator
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    # data: tasks, strides and codec are the operator's
    start_every: int = 10       # roll-outs of the operator start at every n-th frame
    # model
    model: BodyConfig = BodyConfig(depth=4)  # six blocks, as the operator has: not tried
    # optimisation
    steps: int = 1000           # optimizer steps
    batch_size: int = 64        # global: the number of processes does not change it
    lr: float = 2e-3            # highest learning rate
    weight_decay: float = 0.1   # there are few trajectories to learn from
    warmup: int = 100           # steps to the full learning rate, which then falls to zero
    grad_clip: float = 1.0      # largest norm of the gradient
    ema: float = 0.995          # decay of the averaged weights
    sigma_mean: float = -0.8    # of the logarithm of the noise levels that are trained
    sigma_std: float = 1.4
    shift: bool = True          # random circular shifts of periodic tasks
    seed: int = 0               # of weights, batches, shifts and noise
    # evaluation
    members: int = 16           # of an ensemble
    calls: int = 8              # network calls that draw a member, at most
    correct_every: int = 1      # steps of the operator between two corrections

    def __post_init__(self):
        super().__post_init__()
        check(self, calls=(1, math.inf))


def diffusion_loss(model, batch, tasks):
    """Error (B,) of denoising the compressed residual."""
    task = tasks[batch["task"]]
    z, inputs = task.augment(batch["z"], batch.get("shift"), batch.get("inputs"))
    z0, z1_hat, z1 = z.unbind(1)  # (B, N, D)
    clean = compress(z1 - z1_hat, batch["table"])
    net = functools.partial(model, z0=z0, z1_hat=z1_hat, lead=batch["lead"], dt=batch["dt"],
                            cond=batch["cond"], task=batch["task"],
                            inputs=inputs if inputs is None else inputs[:, 0])
    return denoising_loss(net, clean, batch["sigma"], batch["noise"], weight=task.valid)


def prepared(batch, cfg, tasks, corrector):
    """Add the random numbers of the step; the loss applies them, inside its graph."""
    if cfg.shift:
        batch["shift"] = noise.uniform(batch, cfg, 3, use="augment")  # share of each axis
    normal = noise.normal(batch, cfg, *batch["z"].shape[2:], use="noise")
    batch["noise"] = tasks[batch["task"]].valid * normal
    batch["sigma"] = training_sigma(noise.normal(batch, cfg, use="sigma"), cfg.sigma_mean,
                                    cfg.sigma_std)
    batch["table"] = corrector.table(batch["task"], batch["lead"])
    return batch


def evaluate(accelerator, operator, corrector, tasks, cfg):
    """Validation CRPS, for each task, as a share of the operator's absolute error."""
    scores = {"val/crps_ratio": 0.0}
    for index, task in enumerate(tasks):
        ratio = val_ratio(accelerator, operator, task, index, corrector, cfg)
        scores["val/crps_ratio"] += ratio / len(tasks)
        if len(tasks) > 1:
            scores[f"val/{task.name}/crps_ratio"] = ratio
    return scores


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "diffusion") as run:
        if run.finished:
            return
        accelerator = run.accelerator

        # data
        operator = load_operator(cfg.run)
        operator.model.to(accelerator.device)
        latents = open_latents(run, inherit(cfg, operator), "fit", length=math.inf)
        residuals = Residuals(operator.model, latents.windows, accelerator.device, cfg.start_every)
        loader = run.loader(residuals)

        # model
        tables = [residuals.compression(index) for index in range(len(latents.tasks))]
        model = run.compile(Corrector(cfg.model, operator.model.tasks, tables))
        optimizer = Muon(model, cfg.lr, momentum=0.95, rms=0.4, weight_decay=cfg.weight_decay)

        # prepare
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        corrector = accelerator.unwrap_model(model)  # draws members with the weights of `model`
        ema = EMA(model, cfg.ema)
        loss = functools.partial(diffusion_loss, tasks=latents.tasks)
        backward = Backward(run, model, loss)
        run.resume(model, optimizer, ema, backward,
                   built_on=latents.fingerprints | {"operator": operator.mark})

        # train
        @run.replay  # with --compile on a GPU: a CUDA graph
        def update():
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        for batch in run.progress(loader):  # global batch k is a function of (seed, k) alone
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(prepared(batch, cfg, latents.tasks, corrector))
            grad_norm = update()

            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = evaluate(accelerator, operator.model, corrector, latents.tasks, cfg)
                run.log(scores)
                ema.keep_best(scores["val/crps_ratio"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export
        with ema.applied(model, best=True):
            run.export(model, {"tasks": operator.config["tasks"],
                               "tables": [tuple(table.shape) for table in tables]})
            correctors = {f"diffusion, {cfg.calls} calls": (corrector, cfg.calls)}
            finish_ensembles(run, operator.model, correctors, latents.tasks)


if __name__ == "__main__":
    command(main)
