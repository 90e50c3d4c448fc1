"""What the latent cache costs: reading, opening, memory, building. Prints one table.

    python -m benchmarks.cache [--gigabytes 5] [--folder /tmp]

gather      bytes of a batch / time of `LatentWindows.__getitems__`, pages warm, against `clone()`
            of as many bytes, block after block of a buffer as large as a shard (both: best of 200,
            taken in turns), and against one `torch.save` file per sample, `torch.load`, stack.
open        `open_cache` of the large cache: manifest, sizes, headers, maps.
memory      Pss_Anon of a process after 100 batches from the cache, less that of the same process
            with blank batches of that size. Not in it: pages of the mapped files (the kernel's page
            cache, one copy per machine, given back under pressure) and the loader's batches on
            their way from worker to rank (shared memory, the same with any data set).
build       field bytes / time of `build_cache` from an HDF5 file with the patch codec; waiting for
            I/O is the time in which the encoder stands still for a read or for a write with fsync.
"""

import multiprocessing
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from ups.cache import encode, store
from ups.cache.sampler import StepSampler
from ups.cache.store import build_cache, open_cache
from ups.cache.windows import LatentWindows, whole_batch
from ups.config import UsageError, command, parse
from ups.data.facts import Facts
from ups.data.find import open_fields
from ups.data.make import make
from ups.models.codec import CodecSpec, fit_patch
from ups.train.ranks import make_accelerator

FRAMES, TOKENS, WIDTH, LENGTH, BATCH = 41, 64, 32, 8, 64


@dataclass(frozen=True)
class Config:
    gigabytes: float = 5.0  # size of the large cache
    folder: str = "/tmp"  # a folder in it is made, and removed at the end


class BlankFields:
    """Trajectories of one grid point, all zero."""

    facts = Facts("synthetic", ("u",), ("x",), (1,), ("periodic",), ((0.0, 1.0),), 0.05, FRAMES)
    digest, stride_x, frames = "", 1, range(FRAMES)

    def __init__(self, count):
        self.count = count

    def split(self, name):
        return torch.arange(self.count)

    def stream(self, indices):
        return (torch.zeros(FRAMES * len(part), 1, 1) for part in indices.split(16))

    def params(self, indices):
        return torch.ones(len(indices), 0)


class NoiseCodec(torch.nn.Module):
    """Latents that are noise: a cache of any size, made by `build_cache`."""

    spec = CodecSpec("synthetic", (1,), (1, 1, TOKENS), ("u",), WIDTH)
    weight = torch.ones(WIDTH)

    def encode(self, u):
        return torch.randn(64, TOKENS, WIDTH)[torch.arange(len(u)) % 64]

    def decode(self, z):
        return z[:, :1, :1]


def synthetic(root, gigabytes):
    count = max(1, int(gigabytes * 1e9 / (4 * FRAMES * TOKENS * WIDTH)))
    return build_cache(make_accelerator(), NoiseCodec(), BlankFields(count), "train", root).folder


def best(*functions, repeats=200):
    """The best time of each, taken in turns so that another load on the machine hits all alike."""
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, into in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            into.append(time.perf_counter() - start)
    return [min(into) for into in times]


def gathers(caches, row):
    """Bandwidth of batches of 64 windows of 9 frames (4.7 MB), from one and from many shards."""
    size = BATCH * (LENGTH + 1) * TOKENS * WIDTH
    buffer = torch.randn(store.SHARD_BYTES // 4 // size, size)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cache in caches:
            windows = LatentWindows([cache], LENGTH)
            batches = iter(StepSampler(windows.sizes, BATCH, 10**9, seed=0))
            for z in cache.z:
                z.sum()  # warm
            blocks = iter(range(10**9))
            copied, gathered = best(lambda b=blocks: buffer[next(b) % len(buffer)].clone(),
                                    lambda w=windows, b=batches: w.__getitems__(next(b)))
            rates = [4 * size / seconds / 1e9 for seconds in (gathered, copied)]
            row(f"gather, {len(cache.z)} shard(s), {threads} thread(s)",
                f"{rates[0]:.1f} GB/s", f"{copied / gathered:.2f} of a copy at {rates[1]:.1f} GB/s",
                "at least 0.5")
    torch.set_num_threads(1)


def files(cache, root, row):
    """The same windows from one file each."""
    windows = LatentWindows([cache], LENGTH)
    batches = list(StepSampler(windows.sizes, BATCH, 8, seed=0))
    root.mkdir()
    for batch in batches:
        for step, place, pair in batch:
            sample = windows.__getitems__([(step, place, pair)])["z"][0]
            torch.save(sample, root / f"{step}_{place}.pt")
    turn = iter(range(10**9))

    def load():
        step = next(turn) % len(batches)
        return torch.stack([torch.load(root / f"{step}_{i}.pt") for i in range(BATCH)])

    turns = iter(range(10**9))
    loaded, gathered = best(load, lambda: windows.__getitems__(batches[next(turns) % 8]),
                            repeats=100)
    row("one torch.save file per sample", f"{1e3 * loaded:.1f} ms a batch",
        f"the cache is {loaded / gathered:.0f} times faster", "at least 20")


class Weighed(Dataset):
    """Adds the memory of the process that makes a batch; without a cache, batches are blank."""

    def __init__(self, windows=None):
        self.windows = windows

    def __getitems__(self, triples):
        if self.windows is None:
            batch = {"z": torch.zeros(len(triples), LENGTH + 1, TOKENS, WIDTH)}
        else:
            batch = self.windows.__getitems__(triples)
        return batch | {"memory": own_memory()}


def own_memory():
    """Pss_Anon of this process in MB."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss_Anon")) / 1e3


def consume(folder, with_cache, workers, sizes, result):
    """A rank: open, read 100 batches, report the memory of rank and of its loader workers."""
    torch.set_num_threads(1)
    data = Weighed(LatentWindows([open_cache(folder)], LENGTH) if with_cache else None)
    loader = DataLoader(data, batch_sampler=StepSampler(sizes, BATCH, 100, seed=0),
                        collate_fn=whole_batch, num_workers=workers)
    seen = [batch["memory"] for batch in loader][-10:]
    result.put((own_memory(), max(seen)))


def memory(cache, row):
    sizes = LatentWindows([cache], LENGTH).sizes
    context = multiprocessing.get_context("spawn")
    used = {}
    for workers in (0, 2):
        for with_cache in (False, True):
            result = context.Queue()
            process = context.Process(target=consume, args=(cache.folder, with_cache, workers,
                                                            sizes, result))
            process.start()
            used[workers, with_cache] = result.get()
            process.join()
    for name, workers, part in (("rank, no workers", 0, 0), ("rank, 2 workers", 2, 0),
                                ("loader worker", 2, 1)):
        without, with_ = used[workers, False][part], used[workers, True][part]
        row(f"memory added to a {name}", f"{with_ - without:.1f} MB",
            f"{without:.0f} MB without, {with_:.0f} MB with a cache", "under 50 MB")


def building(root, row):
    """Encode 0.8 GB of one-dimensional fields."""
    make("advection1d", preset="pdebench", out=root / "data", samples=1000)
    fields = open_fields("advection1d", root / "data")
    spec, part = fields.facts, fields.split("train")[:32]
    codec = fit_patch(lambda: fields.stream(part), lambda: fields.stream(part),
                      facts=spec.plain(), patch=(16,), components=8)
    waited = {"read": 0.0, "write": 0.0}

    def timed(what, function):
        def call(*args):
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                waited[what] += time.perf_counter() - start
        return call

    ahead, write = encode._ahead, store._write

    def timed_ahead(items):
        items = ahead(items)
        wait = timed("read", next)
        while (item := wait(items, None)) is not None:
            yield item

    encode._ahead, store._write = timed_ahead, timed("write", write)
    start = time.perf_counter()
    cache = build_cache(make_accelerator(), codec, fields, "train", root / "cache")
    seconds = time.perf_counter() - start
    encode._ahead, store._write = ahead, write
    frames = len(cache) * spec.frames
    row(f"build on {codec.weight.device.type}, with error and sha256",
        f"{4 * frames * spec.grid[0] / seconds / 1e6:.0f} MB/s of fields",
        f"{frames / seconds:.0f} frames/s, codec nRMSE {cache.error.mean():.1e}", "")
    share = {what: f"{100 * value / seconds:.0f} %" for what, value in waited.items()}
    row("  of it waiting for I/O", f"{100 * sum(waited.values()) / seconds:.0f} %",
        f"read {share['read']}, write {share['write']}", "")


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    need, free = 1.3 * cfg.gigabytes + 3, shutil.disk_usage(cfg.folder).free / 1e9
    if need > free:
        raise UsageError(f"{cfg.folder} has {free:.1f} GB free and this needs {need:.1f} GB: "
                         "take --gigabytes or --folder to fit.")
    torch.set_num_threads(1)

    def row(what, value, detail, goal):
        print(f"| {what:42} | {value:18} | {detail:46} | {goal:12} |", flush=True)

    row("what", "value", "detail", "goal")
    row("-" * 42, "-" * 18, "-" * 46, "-" * 12)
    with tempfile.TemporaryDirectory(dir=cfg.folder) as name:
        root = Path(name)
        small = open_cache(synthetic(root / "small", 0.2))
        folder = synthetic(root / "large", cfg.gigabytes)
        start = time.perf_counter()
        large = open_cache(folder)
        milliseconds = 1e3 * (time.perf_counter() - start)
        row(f"open {cfg.gigabytes:g} GB, {len(large.z)} shards", f"{milliseconds:.0f} ms",
            f"{len(large)} trajectories", "under 1 s")
        gathers([small, large], row)
        files(large, root / "files", row)
        memory(large, row)
        building(root, row)


if __name__ == "__main__":
    command(main)
