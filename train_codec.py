"""Learn the codec  u -> z -> u  of one task: fields to latent tokens, back, and to any point.

    accelerate launch train_codec.py                                              # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_codec.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_codec.py --compile

Run the same command again to resume. The other stages use it with `--codec grid` in the same run.
Writes runs/NAME/codec/TASK/: metrics.jsonl, checkpoints/, model/ (best average by validation),
test.json and codec.png.
"""

import dataclasses
import functools
import itertools
import math

import torch
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from ups.cache.sampler import StepSampler
from ups.cache.windows import whole_batch
from ups.config import UsageError, check, command, parse
from ups.data.find import names_of
from ups.eval.finish import codec_error, test_codec
from ups.files import read_json
from ups.latents import frames_of, open_latents
from ups.models.grid_codec import (
    GridCodecConfig,
    codec_loss,
    fit_line,
    from_patch,
    measure_weight,
)
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import AdamW, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward, Captured, compile_model


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    # data
    stride_x: int = 1           # take every n-th grid point; any-point decoding is judged on all
    stride_t: int = 1           # take every n-th frame
    patch: int = 8              # grid points per token and axis
    width: int = 2              # latent channels per token
    cache_dtype: str = "float32"  # float32, float16 or bfloat16
    # model
    model: GridCodecConfig = GridCodecConfig()
    # optimisation
    steps: int = 2000           # optimizer steps
    batch_size: int = 32        # global: the number of processes does not change it
    lr: float = 1e-3
    warmup: int = 100           # steps to the full learning rate, which then falls to zero
    grad_clip: float = 1.0
    ema: float = 0.999          # decay of the averaged weights
    points: int = 64            # grid values that the any-point decoder is asked for in a step
    point_weight: float = 0.3   # of their error in the loss
    inverse_weight: float = 0.1  # of |E(D(z)) - z| in the loss
    noise: float = 0.02         # on the latents that D must map to fields and E back
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        check(self, width=(1, math.inf), points=(1, math.inf), point_weight=(0, 1e3),
              inverse_weight=(0, 1e3), noise=(0, 10))
        if len(names := names_of(self)) != 1:
            raise UsageError(f"{' and '.join(names)}: a codec belongs to one data set; choose one "
                             "by --tasks.")


def prepared(batch, cfg, task):
    """Add the fields, and what is random in this step: query points and noise on the latents."""
    z = batch["z"][:, batch["step"] % 2]  # either frame of the window
    batch = {"u": task.codec.decode(z), "rows": batch["rows"], "step": batch["step"]}
    batch["noise"] = cfg.noise * noise.normal(batch, cfg, (z.shape[1], cfg.width))
    source = noise.generator(z.device, cfg.seed, batch["step"], stream=1)
    points = math.prod(task.codec.grid)
    batch["index"] = torch.randint(points, (cfg.points,), device=z.device, generator=source)
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, f"codec/{names_of(cfg)[0]}") as run:
        if run.finished:
            return
        accelerator = run.accelerator
        if read_json(run.folder / "model" / "config.json").get("kind") == "patch":
            raise UsageError(f"{run.folder} holds the patch codec of this run's operator, which "
                             "would be lost; give another --run.")
        if accelerator.distributed_type == DistributedType.FSDP:
            raise UsageError("a codec is too small for FSDP, and encodes and decodes outside of "
                             "what FSDP knows; use accelerate_configs/2gpu.yaml.")

        # data
        latents = open_latents(accelerator, cfg, "train", folder=run.folder / "start",
                               components="all")  # lossless tokens: fields, by memory map
        task, = latents.tasks
        sampler = StepSampler(latents.windows.sizes, cfg.batch_size, cfg.steps, cfg.seed)
        loader = DataLoader(latents.windows, batch_sampler=sampler, collate_fn=whole_batch,
                            **run.loader_options(latents.windows))

        def frames(split, pieces=16):  # for the closed-form start
            for u in itertools.islice(frames_of(task.fields, split), pieces):
                yield u.to(accelerator.device)

        # model
        if not 1 <= cfg.width <= task.codec.spec.width:
            raise UsageError(f"--width {cfg.width}: a patch of {task.codec.spec.width} values is "
                             f"compressed to 1 to {task.codec.spec.width} latent channels.")
        model = from_patch(task.codec, cfg.width, cfg.model).to(accelerator.device)
        fit_line(model, lambda: frames("train"), lambda: frames("val"))
        if cfg.compile:
            compile_model(model)
        optimizer = AdamW(model.parameters(), cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)

        # prepare
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        ema = EMA(model, cfg.ema, compile=run.graphs)
        loss = functools.partial(codec_loss, point=cfg.point_weight, inverse=cfg.inverse_weight)
        backward = Backward(run, model, loss, cfg.micro_batch, graphs=run.graphs,
                            shared=("index",))
        run.resume(model=model, optimizer=optimizer, ema=ema, sampler=sampler, backward=backward,
                   lineage=latents.lineage)

        # train
        def update():
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), cfg.grad_clip)
            optimizer.step()
            ema.update(model)
            return grad_norm

        update = Captured(update, run.graphs)  # with --compile on CUDA one replay, else as it reads
        for batch in run.progress(loader):  # global batch k is a function of (seed, k) alone
            lr = set_lr(optimizer, cfg.lr * warmup_then_linear(run.step, cfg.warmup, cfg.steps))
            loss = backward(prepared(batch, cfg, task))  # same outcome on every rank
            grad_norm = update()

            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    codec = accelerator.unwrap_model(model)
                    scores = {"val/nrmse": codec_error(accelerator, codec, task, "val")}
                run.log(scores)
                ema.keep_best(scores["val/nrmse"])
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export
        with ema.applied(model, best=True):
            codec = accelerator.unwrap_model(model)
            measure_weight(codec, next(frames("train"))[:256])
            run.export(model, codec.config | {"data": task.fields.digest})
            test_codec(run, codec, task)


if __name__ == "__main__":
    command(main)
