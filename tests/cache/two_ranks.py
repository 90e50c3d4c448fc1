"""What each of two ranks sees: a build, a loader, and a disk that is full for rank 1 alone."""

import resource
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from cache_standins import FormulaFields, MatrixCodec
from torch.utils.data import DataLoader, default_convert

from ups.cache import store
from ups.cache.sampler import StepSampler
from ups.cache.store import build_cache
from ups.cache.windows import LatentWindows
from ups.config import UsageError

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True,
                          dataloader_config=DataLoaderConfiguration(split_batches=True))
rank = accelerator.process_index
seen = {"processes": accelerator.num_processes}

# build
store.SHARD_BYTES = 2000
fields = FormulaFields()
cache = build_cache(accelerator, MatrixCodec(), fields, "train", folder / "cache")
seen["reads"] = fields.reads
build_cache(accelerator, MatrixCodec(), fields, "train", folder / "cache")
seen["reads_again"] = fields.reads

# load
windows = LatentWindows([cache], length=2)
for workers in (0, 1):
    sampler = StepSampler(windows.sizes, batch_size=6, steps=40, seed=1, start=4)
    loader = DataLoader(windows, batch_sampler=sampler, collate_fn=default_convert,
                        num_workers=workers)
    seen[f"batches_{workers}"] = list(accelerator.prepare(loader))

# fail
before = resource.getrlimit(resource.RLIMIT_FSIZE)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
start = time.perf_counter()
try:
    build_cache(accelerator, MatrixCodec(), FormulaFields(), "train", folder / "full")
except UsageError as error:
    seen["full"] = str(error)
seen["full_seconds"] = time.perf_counter() - start
resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Broken(MatrixCodec):
    def encode(self, u):
        if rank == 1:
            raise ZeroDivisionError("no such number")
        return super().encode(u)


try:
    build_cache(accelerator, Broken(), FormulaFields(), "train", folder / "broken")
except Exception as error:
    seen["broken"] = f"{type(error).__name__}: {error}"
seen["after"] = build_cache(accelerator, MatrixCodec(), FormulaFields(), "train",
                            folder / "full").shape[0]
torch.save(seen, folder / f"rank{rank}.pt")
accelerator.end_training()
