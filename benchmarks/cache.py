"""What the latent cache costs: building, opening, reading. Prints one table.

    python -m benchmarks.cache [--samples 1000] [--folder /tmp]

build       field bytes / time of encoding advection1d (201 x 1024 points) with the patch codec,
            reconstruction error and checksums included.
gather      bytes of a batch / time of `LatentWindows.__getitems__`, pages warm, against `clone()`
            of as many bytes, block after block of a large buffer (best of 200, in turns).
"""

import tempfile
import time
import timeit
from dataclasses import dataclass
from pathlib import Path

import torch

import train_operator
from benchmarks.bench import heading, row
from ups.cache import store
from ups.cache.sampler import StepSampler
from ups.cache.windows import LatentWindows
from ups.config import command, parse
from ups.data.make import make
from ups.latents import open_tasks
from ups.models.codec import CodecConfig
from ups.train.ranks import make_accelerator

LENGTH, BATCH = 8, 64  # steps of a window, windows of a batch


@dataclass(frozen=True)
class Config:
    samples: int = 1000   # trajectories of the data
    folder: str = "/tmp"  # a folder in it is made, and removed at the end


def build(root, name, shard_bytes):
    """Encode the data into a cache of its own; return it, and the seconds."""
    store.SHARD_BYTES = shard_bytes
    cfg = train_operator.Config(run=str(root / "run"), data=(str(root / "data"),),
                                tasks=("advection1d",), cache=str(root / name), codec=CodecConfig(
                                    patch=16, components="all"))
    begin = time.perf_counter()
    task, = open_tasks(make_accelerator(), cfg, "train")
    return task.cache, time.perf_counter() - begin


def seconds_of(function):
    return timeit.timeit(function, number=1)


def gather(cache, threads):
    """Bandwidth of random windows from a cache."""
    torch.set_num_threads(threads)
    windows = LatentWindows([cache], LENGTH)
    batches = iter(StepSampler(windows.sizes, BATCH, 10**9, seed=0))
    buffer = torch.randn(50, *windows.__getitems__(next(batches))["z"].shape)
    for z in cache.z:
        z.sum()  # warm
    blocks = iter(range(10**9))
    copy, read = (lambda: buffer[next(blocks) % len(buffer)].clone(),
                  lambda: windows.__getitems__(next(batches)))
    copied, gathered = map(min, zip(*((seconds_of(copy), seconds_of(read)) for _ in range(200)),
                                    strict=True))
    torch.set_num_threads(1)
    size = 4e-9 * buffer[0].numel()
    row(f"gather, shards {len(cache.z)}, threads {threads}", f"{size / gathered:.1f} GB/s",
        f"{copied / gathered:.2f} of a copy at {size / copied:.1f} GB/s", "at least 0.5")


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=cfg.folder) as name:
        root = Path(name)
        make("advection1d", preset="pdebench", out=root / "data", samples=cfg.samples)
        many, _ = build(root, "many", 2**24)  # fits the codec, too
        one, seconds = build(root, "one", 2**40)
        heading(f"{one.folder.name}: {one.shape}, float32", "what", "value", "detail", "goal")
        frames = one.shape[0] * one.shape[1]
        row("build, with error and sha256", f"{4096 * frames / seconds / 1e6:.0f} MB/s of fields",
            f"{frames / seconds:.0f} frames/s", "")
        opening = min(seconds_of(lambda: store.open_cache(many.folder)) for _ in range(5))
        row(f"open, shards {len(many.z)}", f"{1e3 * opening:.0f} ms", "", "under 1 s")
        for cache in (one, many):
            for threads in (1, 2):
                gather(cache, threads)


if __name__ == "__main__":
    command(main)
