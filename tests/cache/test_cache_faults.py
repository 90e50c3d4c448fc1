"""Builds that are killed, that race, that find no room, and caches on a read-only disk."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest
import torch
from cache_standins import FormulaFields, MatrixCodec, OneRank, contents
from torch.utils.data import DataLoader, default_convert

from ups.cache import store
from ups.cache.sampler import StepSampler
from ups.cache.store import build_cache, open_cache, verify
from ups.cache.windows import LatentWindows
from ups.config import UsageError
from ups.files import lock

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 2000)  # eight shards


def build(root, pause=0.0):
    fields = FormulaFields(pause=pause)
    return build_cache(OneRank(), MatrixCodec(), fields, "train", root), fields.reads


def child(root, pause, started, result=None):
    torch.set_num_threads(1)
    started.set()
    reads = build(root, pause)[1]
    if result is not None:
        result.put(reads)


def test_a_killed_build_is_never_opened_and_the_next_one_is_the_same(tmp_path):
    reference = contents(build(tmp_path / "whole")[0].folder)
    assert len(reference) == 9
    draw, seen = random.Random(0), []
    for trial in range(27):
        root, started = tmp_path / str(trial), FORK.Event()
        process = FORK.Process(target=child, args=(root, 0.003, started))
        process.start()
        started.wait()
        # a random moment after a number of files: moments by the clock miss on a busy machine
        while len(list(root.glob("*/[!.]*"))) < trial % 9 and process.is_alive():
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for folder in [path for path in root.glob("*") if path.is_dir()]:
            if (folder / "manifest.json").exists():
                assert contents(folder) == reference
            else:
                with pytest.raises(UsageError, match="is no complete cache"):
                    open_cache(folder)
            seen.append(len(list(folder.glob("[!.]*"))))
        done = len(list(root.glob("*/shard-*.safetensors")))
        cache, reads = build(root)
        assert reads == max(0, 15 - 2 * done)  # what is there is not encoded again: two reads each
        assert contents(cache.folder) == reference  # no lock, no temporary file is left
    assert len(set(seen)) >= 5 and min(seen) < 9, seen  # kills fell into many states of a build


def test_two_builds_at_once_are_one(tmp_path):
    alone = build(tmp_path / "alone")[1]
    started, result = FORK.Event(), FORK.Queue()
    both = [FORK.Process(target=child, args=(tmp_path / "both", 0.01, started, result))
            for _ in range(2)]
    for process in both:
        process.start()
    reads = [result.get(timeout=30) for _ in both]
    for process in both:
        process.join()
    assert sorted(reads) == [0, alone]
    folder, = [path for path in (tmp_path / "both").iterdir() if path.is_dir()]
    assert contents(folder) == contents(next((tmp_path / "alone").glob("*/")))


def test_the_lock_goes_with_its_process(tmp_path):
    path, held = tmp_path / "x.lock", FORK.Event()

    def hold():
        own = lock(path, "--cache")
        held.set()
        time.sleep(60)
        own.close()

    process = FORK.Process(target=hold)
    process.start()
    held.wait()
    assert lock(path, "--cache") is None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    own = lock(path, "--cache")
    assert own is not None
    own.close()


@pytest.mark.parametrize("room, name", [(500, "shard-00000.safetensors"), (4500, "manifest.json")])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, room, name):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if name == "manifest.json":  # shards fit, the manifest does not
        store.SHARD_BYTES, room = 500, len(contents(whole := build(tmp_path)[0].folder)[name]) - 1
        shutil.rmtree(whole)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        with pytest.raises(UsageError, match=f"{name} .* cannot be written .File too large.: make"):
            build(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder, = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert not (folder / "manifest.json").exists()
    assert not [path for path in folder.iterdir() if path.name.endswith(".partial")]
    assert build(tmp_path)[0].shape[0] == 30


def test_a_file_in_the_place_of_the_cache_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file cannot be written .*another --cache"):
        lock(tmp_path / "file" / "key.lock", "--cache")


def reader(root, result):
    """A process that may only read: what it finds."""
    torch.set_num_threads(1)
    if os.getuid() == 0:
        os.setuid(65534)  # permission bits do not bind root
    with pytest.raises(PermissionError):
        (root / "probe").touch()
    cache, reads = build(root)
    windows = LatentWindows([cache], 2)
    batch, = DataLoader(windows, batch_sampler=StepSampler(windows.sizes, 4, 1, 0),
                        collate_fn=default_convert)
    result.put([reads, verify(cache.folder), list(batch["z"].shape)])


def test_a_read_only_cache_works():
    with tempfile.TemporaryDirectory() as name:  # all may enter it, unlike pytest's folder
        root, result = Path(name), FORK.Queue()
        folder = build(root)[0].folder
        root.chmod(0o555)
        folder.chmod(0o555)
        before = [os.stat(path).st_mtime_ns for path in (root, folder)]
        process = FORK.Process(target=reader, args=(root, result))
        process.start()
        assert result.get(timeout=60) == [0, [], [4, 3, 4, 3]]
        process.join()
        assert before == [os.stat(path).st_mtime_ns for path in (root, folder)]
        root.chmod(stat.S_IRWXU)
        folder.chmod(stat.S_IRWXU)
