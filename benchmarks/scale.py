"""A training step of large operators on one GPU: milliseconds, TFLOP/s and memory.

    python -m benchmarks.scale                 # about four minutes on an H200
    python -m benchmarks.scale --shrink 16     # tries the command, on a CPU too

A step is forward, backward and fused AdamW of single transitions, on latents that lie on the
device, replayed as a CUDA graph; blocks are compiled one by one. The U-Nets have about as many
parameters, see the same points, of one channel, and are compiled as a whole. TFLOP/s count the
products of forward and backward once, whatever is recomputed; `of dense` is their share of the
card's rate in products of 8192 x 8192 matrices in bfloat16. GiB are the peak, and what of it is
neither weights, gradients nor optimizer: activations.
"""

import dataclasses
import gc
import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.bench import device_name, heading, row
from benchmarks.networks import UNet, UNetConfig
from ups.config import check, command, parse
from ups.models.body import BodyConfig
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.models.precision import products
from ups.train.optim import AdamW, Muon
from ups.train.ranks import now
from ups.train.step import CudaGraphed

PLANE, CUBE = (1, 64, 64), (32, 32, 32)  # tokens
XL = {"dim": 512, "depth": 12, "modes": 16}
ROWS = [  # name, rows, tokens, sizes, how
    ("2-D, 64 x 64 tokens, 16 waves", 8, PLANE, XL, ("float32", "tf32", "bf16", "bf16 recompute",
                                                     "bf16 Muon")),
    ("the same, batches of 64", 64, PLANE, XL, ("bf16", "bf16 recompute")),
    ("without waves", 8, PLANE, XL | {"modes": 0}, ("tf32", "bf16")),
    ("3-D, 32^3 tokens, 12 waves", 2, CUBE, {"dim": 256, "depth": 8, "modes": 12},
     ("tf32", "bf16", "bf16 recompute")),
    ("2-D, compiled as a whole", 8, PLANE, XL, ("bf16 whole",)),
    ("U-Net, 256 x 256 points", 8, (256, 256), {"width": 304}, ("tf32", "bf16")),
    ("U-Net, 128^3 points", 2, (128, 128, 128), {"width": 76}, ("tf32", "bf16")),
]


@dataclasses.dataclass(frozen=True)
class Config:
    only: str = ""     # rows whose names begin so
    steps: int = 10    # that are timed, after 3 that compile
    shrink: int = 1    # divides widths and the sides of grids

    def __post_init__(self):
        check(self, steps=(1, 10**6), shrink=(1, 32))


def build(rows, tokens, sizes, how, shrink, device):
    """A model and its batch."""
    tokens = tuple(max(1, n // shrink) for n in tokens)
    if "width" in sizes:
        config = UNetConfig(max(4, sizes["width"] // shrink))
        with torch.device(device):
            return UNet(config, 1, 1, tokens, True), torch.randn(rows, 1, *tokens)
    sizes = sizes | {"dim": max(16, sizes["dim"] // shrink)}
    config = BodyConfig(precision="bfloat16" if "bf16" in how else "float32", **sizes)
    with torch.device(device):
        model = LatentOperator(config, [TaskSpec("t", tokens, 16, (True, True, True))])
        for layer in (*model.body.modulation, model.body.out[0]):  # alive, as in training
            torch.nn.init.normal_(layer.weight, std=1e-2)
        return model, torch.randn(rows, math.prod(tokens), 16)


def flops(rows, tokens, sizes, shrink, device):
    """Of the products in forward and backward; they are as many for each row."""
    model, z = build(1, tokens, sizes, "float32", shrink, device)
    with FlopCounterMode(display=False) as counter:
        loss_of(model, z).backward()
    return rows * counter.get_total_flops()


def loss_of(model, z, how=""):
    if isinstance(model, UNet):
        with torch.autocast(z.device.type, torch.bfloat16, enabled="bf16" in how):
            return (model(z) - z).float().square().mean()
    given = torch.full((len(z),), 0.1, device=z.device), z.new_zeros(len(z), 0)
    return (model(z, *given) - z).float().square().mean()


def step_of(rows, tokens, sizes, how, cfg, device):
    """The training step of a row as a function, and its parameters."""
    model, z = build(rows, tokens, sizes, how, cfg.shrink, device)
    blocks = [model] if "width" in sizes else model.body.blocks
    for block in blocks:
        block.recompute = "recompute" in how
    for part in [model] if "whole" in how else blocks:
        part.compile(dynamic=False, disable=device.type == "cpu")  # there it takes minutes
    kind = Muon if "Muon" in how else AdamW
    optimizer = kind(model if kind is Muon else model.parameters(), 1e-4)

    @products("highest" if how == "float32" else "high")
    def step():
        loss = loss_of(model, z, how)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return CudaGraphed(step, device.type == "cuda"), list(model.parameters())


def measure(name, rows, tokens, sizes, how, cfg, dense):
    """Print a row."""
    device = torch.device("cuda" if dense else "cpu")
    torch.compiler.reset()
    gc.collect()
    if dense:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step, params = step_of(rows, tokens, sizes, how, cfg, device)
        for count in (3, cfg.steps):
            begin = now()
            for _ in range(count):
                loss = step()
        ms = 1e3 * (now() - begin) / cfg.steps
    except torch.OutOfMemoryError:
        row(f"{name}; {how}", rows, "", "out of memory", width=60)
        return
    assert math.isfinite(loss)
    peak, count = torch.cuda.max_memory_allocated() if dense else 0, sum(p.numel() for p in params)
    rate = flops(rows, tokens, sizes, cfg.shrink, device) / ms / 1e9
    kept = 16 * count  # weights, gradients, two moments
    row(f"{name}; {how}", rows, f"{count / 1e6:.0f} M", f"{ms:.1f}", f"{rate:.0f}",
        f"{rate / dense:.2f}" if dense else "", f"{peak / 2**30:.1f}",
        f"{max(0, peak - kept) / 2**30:.1f}", width=60)


def dense_rate(size=8192):
    """TFLOP/s of products of bfloat16 matrices."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for count in (5, 30):
        begin = now()
        for _ in range(count):
            a @ a
        rate = 2e-12 * count * size**3 / (now() - begin)
    return rate


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    cuda, start = torch.cuda.is_available(), now()
    dense = dense_rate() if cuda else 0.0
    heading(f"a training step, {device_name()}, torch {torch.__version__}, {dense:.0f} TFLOP/s "
            "in dense products", "model", "rows", "parameters", "ms", "TFLOP/s", "of dense", "GiB",
            "of these activations", width=60)
    for name, rows, tokens, sizes, ways in [r for r in ROWS if r[0].startswith(cfg.only)]:
        for how in ways:
            measure(name, rows, tokens, sizes, how, cfg, dense)
    print(f"\n{now() - start:.0f} s in all.")


if __name__ == "__main__":
    command(main)
