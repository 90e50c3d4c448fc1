"""Learn the codec  u -> z -> u  of one task: fields to latent tokens, back, and to any point.

    accelerate launch train_codec.py                                              # CPU
    accelerate launch --config_file accelerate_configs/1gpu.yaml train_codec.py --compile
    accelerate launch --config_file accelerate_configs/2gpu.yaml train_codec.py --compile

The same command again resumes. Other stages use it with `--codec.kind grid` in the same run.
Writes runs/NAME/codec/TASK/: metrics.jsonl, checkpoints/, model/ (best average by validation),
test.json and codec.png.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace

import torch
from accelerate.utils import DistributedType

from ups.config import UsageError, check, command, parse
from ups.data.find import names_of
from ups.eval.finish import codec_error, test_codec
from ups.files import read_json
from ups.latents import open_latents
from ups.models.codec import CodecConfig
from ups.models.grid_codec import GridCodecConfig, codec_loss, from_patch, measure_weight
from ups.train import noise
from ups.train.ema import EMA
from ups.train.optim import AdamW, set_lr, warmup_then_linear
from ups.train.run import Run, RunConfig
from ups.train.step import Backward


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    # data
    stride_x: int = 1           # keep every n-th grid point; any-point decoding is judged on all
    stride_t: int = 1           # keep every n-th frame
    patch: int = 8              # grid points per token and axis
    width: int = 2              # latent channels per token
    # model
    model: GridCodecConfig = GridCodecConfig()
    # optimisation
    steps: int = 2000           # optimizer steps
    batch_size: int = 32        # rows of a step, over all processes together
    lr: float = 1e-3            # peak learning rate
    warmup: int = 100           # steps to the full learning rate, which then falls to zero
    grad_clip: float = 1.0      # largest norm of the gradient; a longer one is scaled down
    ema: float = 0.999          # decay, below 1, of the averaged weights
    points: int = 64            # grid values that the any-point decoder is asked for in a step
    point_weight: float = 0.3   # of the error of these values in the loss
    inverse_weight: float = 0.1  # of |E(D(z)) - z| in the loss
    noise: float = 0.02         # on the latents that D must map to fields and E back
    seed: int = 0               # of batches, query points and noise

    def __post_init__(self):
        super().__post_init__()
        check(self, width=(1, math.inf), points=(1, math.inf), point_weight=(0, 1e3),
              inverse_weight=(0, 1e3))
        if len(names := names_of(self)) != 1:
            raise UsageError(f"{' and '.join(names)}: a codec belongs to one data set; choose one "
                             "by --tasks.")


def draw(batch, cfg, task):
    """The fields of this step, and its random numbers: noise on the latents and query points."""
    z = batch["z"][:, batch["step"] % 2]  # either frame of the window
    batch = {"u": task.codec.decode(z), "rows": batch["rows"], "step": batch["step"]}
    batch["noise"] = cfg.noise * noise.normal(batch, cfg, z.shape[1], cfg.width, use="noise")
    source = noise.generator(z.device, cfg.seed, batch["step"], "points")
    index = torch.randint(math.prod(task.codec.grid), (cfg.points,), device=z.device,
                          generator=source)
    batch["index"] = index.expand(len(z), -1)
    return batch


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    with Run(cfg, f"codec/{names_of(cfg)[0]}") as run:
        if run.finished:
            return
        if read_json(run.folder / "model" / "config.json").get("kind") == "patch":
            raise UsageError(f"{run.folder} holds the patch codec of this run's operator, which "
                             "would be lost; give another --run.")
        if run.accelerator.distributed_type == DistributedType.FSDP:
            raise UsageError("a codec is too small for FSDP, and encodes and decodes outside of "
                             "what FSDP knows; use accelerate_configs/2gpu.yaml.")

        # data
        lossless = CodecConfig(patch=cfg.patch, components="all")  # tokens: fields, by memory map
        data = open_latents(run, SimpleNamespace(**vars(cfg) | {
            "codec": lossless, "run": run.folder / "start"}), "train")
        (task,) = data.tasks
        loader = run.loader(data)

        # model
        if not 1 <= cfg.width <= task.codec.width:
            raise UsageError(f"--width {cfg.width}: a patch of {task.codec.width} values is "
                             f"compressed to 1 to {task.codec.width} latent channels.")
        model = from_patch(task.codec, cfg.width, cfg.model).to(run.accelerator.device)
        run.compile(model)
        optimizer = AdamW(model.parameters(), cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)
        model, optimizer, loader = run.accelerator.prepare(model, optimizer, loader)
        ema = EMA(model, cfg.ema)
        loss = functools.partial(codec_loss, point=cfg.point_weight, inverse=cfg.inverse_weight)
        backward = Backward(run, model, loss)
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
            loss = backward(draw(batch, cfg, task))  # gradients; all ranks agree on the outcome
            grad_norm = update()
            if run.every(cfg.log_every):
                run.log({"train/loss": loss, "train/grad_norm": grad_norm, "train/lr": lr})
            if run.every(cfg.eval_every):
                with ema.applied(model):
                    codec = run.accelerator.unwrap_model(model)
                    error = codec_error(run.accelerator, codec, task, "val")
                run.log({"val/nrmse": error})
                ema.keep_best(error)
            if run.every(cfg.save_every) or run.stopping:
                run.save()

        # export and test
        with ema.applied(model, best=True):
            codec = run.accelerator.unwrap_model(model)
            u = next(task.fields.stream(task.fields.split("train")))[:256]
            measure_weight(codec, u.to(run.accelerator.device))
            run.export(model, codec.config | {"data": task.fields.digest})
            test_codec(run, codec, task)


if __name__ == "__main__":
    command(main)
