"""train_operator.py with a model of one's own: a ConvNet over the tokens of one periodic data set.

    accelerate launch --module examples.own_model --run runs/own
    accelerate launch evaluate.py --run runs/own --model examples/own_model.py:ConvNet

The same command again resumes. Data, codec and latents are made where they are missing.
Writes runs/NAME/operator/: metrics.jsonl, checkpoints/, model/, test.json and rollout.png.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ups.config import command, parse
from ups.eval.finish import test_operator, validate
from ups.latents import open_latents
from ups.models.codec import CodecConfig
from ups.parent import begin_from
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclass(frozen=True)
class ConvNetConfig:
    channels: int = 64          # of the hidden layers


class ConvNet(torch.nn.Module):
    def __init__(self, config, tasks):
        super().__init__()
        self.tokens, width, c = tasks[0].tokens, tasks[0].width, config.channels  # of one data set
        kernel = [min(5, n - 1 + n % 2) for n in self.tokens]
        conv = partial(torch.nn.Conv3d, kernel_size=kernel, padding="same", padding_mode="circular")
        self.net = torch.nn.Sequential(conv(tasks[0].history * width + 1 + len(tasks[0].params), c),
                                       torch.nn.GELU(), conv(c, c), torch.nn.GELU(), conv(c, width))
        torch.nn.init.zeros_(self.net[-1].weight)  # "no change" at the start

    def forward(self, z0, dt, cond, task=0, inputs=None):
        z = z0 if z0.ndim == 3 else z0.transpose(1, 2).flatten(2)  # of a history: (B, N, H * D)
        given = torch.cat([torch.log10(dt)[:, None], cond], 1)[:, None].expand(-1, z.shape[1], -1)
        x = torch.cat([z, given], 2).mT.unflatten(2, self.tokens)
        return (z0 if z0.ndim == 3 else z0[:, -1]) + self.net(x).flatten(2).mT


@dataclass(frozen=True)
class Config(RunConfig):
    # data
    stride_x: int = 1           # keep every n-th grid point
    stride_t: int = 1           # keep every n-th frame
    strides: tuple[int, ...] = (1,)  # frames that a step goes: steps of all these sizes, in turn
    history: int = 1            # frames that the operator sees, the last ones; 1 or more
    codec: CodecConfig = CodecConfig()
    # model
    init: str = ""              # run whose codec, sizes and weights training begins from
    model: ConvNetConfig = ConvNetConfig()
    # optimisation
    steps: int = 3000           # optimizer steps
    batch_size: int = 32        # rows of a step, over all processes together
    lr: float = 8e-3            # peak learning rate; a linear warm-up, then linear to zero
    weight_decay: float = 1e-5  # decoupled: weights shrink by lr * this in a step; 0 to 1
    warmup: int = 100           # steps over which the learning rate rises from zero
    grad_clip: float = 1.0      # largest norm of the gradient; a longer one is scaled down
    ema: float = 0.99           # decay, below 1, of the averaged weights: the ones that are used
    noise: float = 0.8          # on z0 at the first step, at most, in units of |z1 - z0|; 0: none
    noise_end: float = 0.008    # the same at the last step
    augment: bool = True        # shifts, mirror images and sums that the equation allows
    # evaluation
    val_trajectories: int = 64  # that a validation rolls out, of each data set
    seed: int = 0               # of weights, batches, moves and noise


def operator_loss(model, batch, tasks):
    """Relative error of one step; 1 means "no better than no change": (B,)."""
    task = tasks[batch["task"]]
    z, inputs = task.augment(batch["z"], batch.get("move"), batch.get("inputs"))
    z0, z1 = z[:, :-1].squeeze(1), z[:, -1]     # (B, N, D) each; with a history z0 (B, H, N, D)
    inputs = inputs if inputs is None else inputs[:, 0]                         # at z0
    start = z0 + task.noise(z0, z1, batch)
    z1_hat = model(start, batch["dt"], batch["cond"], batch["task"], inputs)
    return task.relative_error(z1_hat, z1) / task.typical_change[batch["stride"]]


def draw(batch, cfg):
    """Add this step's random numbers: functions of (seed, step, row), on any number of ranks."""
    if cfg.augment:  # shift, mirror and sum
        batch["move"] = noise.uniform(batch, cfg, 10, use="augment")
    if cfg.noise:
        decay = (cfg.noise_end / cfg.noise) ** (batch["step"] / cfg.steps)
        batch["level"] = cfg.noise * decay * noise.uniform(batch, cfg, use="level")
        batch["noise"] = noise.normal(batch, cfg, *batch["z"][0, :-1].squeeze(0).shape, use="noise")
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, "operator") as run:                # folder and its lock, Accelerator, signals
        if run.finished:
            return
        # data
        data = open_latents(run, cfg, "train", strides=cfg.strides, history=cfg.history)
        loader = run.loader(data)                    # global batch k is a function of (seed, k)

        # model
        model = run.compile(begin_from(cfg, ConvNet(cfg.model, data.specs), data))
        optimizer = Muon(model, cfg.lr, weight_decay=cfg.weight_decay)  # AdamW for the rest
        model, optimizer, loader = run.accelerator.prepare(model, optimizer, loader)
        ema = EMA(model, cfg.ema)
        backward = Backward(run, model, partial(operator_loss, tasks=data.tasks))
        run.resume(model, optimizer, ema, backward, built_on=data.fingerprints)

        @run.replay                                  # with --compile on a GPU: a CUDA graph
        def update():
            grad_norm = run.accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        # train
        for batch in run.progress(loader):
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(draw(batch, cfg))        # gradients; all ranks agree on the outcome
            grad_norm = update()
            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    scores = validate(run, model, data.tasks)     # val/nrmse_1, val/nrmse_rollout
                run.log(scores)
                ema.keep_best(scores["val/nrmse_rollout"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export and test
        with ema.applied(model, best=True):
            run.export(model, data.about)
            test_operator(run, model, data.tasks)


if __name__ == "__main__":
    command(main)
