"""Windows are the frames they say they are, over shards, tasks and dtypes."""

import mmap
from types import SimpleNamespace

import pytest
import torch
from cache_standins import FormulaFields, MatrixCodec, OneRank

from ups.cache import store
from ups.cache import windows as module
from ups.cache.store import build_cache
from ups.cache.windows import LatentWindows, starts_of


def build(root, task="burgers1d", width=3, frames=9, params=("nu",), dtype="float32"):
    fields = FormulaFields(task, frames=frames, params=params)
    return build_cache(OneRank(), MatrixCodec(width=width, task=task), fields, "train", root, dtype)


@pytest.mark.parametrize("shard_bytes", [2**28, 2000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_window_is_the_frames_of_one_trajectory(tmp_path, monkeypatch, shard_bytes, dtype):
    monkeypatch.setattr(store, "SHARD_BYTES", shard_bytes)
    cache = build(tmp_path, dtype=dtype)
    windows = LatentWindows([cache], length=4)
    starts = [0] * 8 + [1] * 4 + [2] * 3 + [3] * 2 + [4] * 2  # of five windows, 8 / (frame + 1)
    assert windows.sizes == [30 * 19] and len(windows) == 570
    assert windows.starts[0].tolist() == starts and starts_of(1).tolist() == [0]
    assert (len(cache.z) > 1) == (shard_bytes == 2000)
    order = torch.randperm(570, generator=torch.Generator().manual_seed(0)).tolist()
    batch = windows.__getitems__([(7, row, (0, w)) for row, w in enumerate(order, start=50)])
    whole = torch.cat(list(cache.z)).float()
    expected = torch.stack([whole[w // 19, starts[w % 19]:starts[w % 19] + 5] for w in order])
    assert batch["z"].dtype == torch.float32 and torch.equal(batch["z"], expected)
    nu = torch.tensor([0.01 * (w // 19 + 1) for w in order])
    assert torch.allclose(batch["cond"], nu[:, None].float())
    assert torch.equal(batch["dt"], torch.full((570,), 0.05))
    assert torch.equal(batch["rows"], torch.arange(50, 620))
    assert (batch["task"], batch["step"]) == (0, 7)
    windows.move(torch.device("cpu"))  # one piece, gathered on its device: the same numbers
    again = windows.__getitems__([(7, row, (0, w)) for row, w in enumerate(order, start=50)])
    assert len(windows.views[0]) == 1
    for key in ("z", "dt", "cond", "rows"):
        assert torch.equal(again[key], batch[key])
    batch["z"].zero_()  # a batch is a copy: the cache stays
    assert torch.equal(torch.cat(list(cache.z)).float(), whole)


@pytest.mark.parametrize("shard_bytes", [2**28, 2000])
def test_windows_of_a_stride_hold_every_nth_frame_and_a_batch_is_of_one_stride(
        tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(store, "SHARD_BYTES", shard_bytes)
    cache = build(tmp_path)
    whole = torch.cat(list(cache.z))
    windows = LatentWindows([cache], 2, strides=(1, 3, 8))
    assert windows.lengths == [2, 2, 1]  # of nine frames
    for chosen, (stride, length) in enumerate([(1, 2), (3, 2), (8, 1)]):
        starts = starts_of(9 - stride * length).tolist()
        assert windows.sizes[chosen] == 30 * len(starts)
        batch = windows.__getitems__([(0, w, (chosen, w)) for w in range(windows.sizes[chosen])])
        expected = [whole[w // len(starts), starts[w % len(starts)]:][::stride][:length + 1]
                    for w in range(windows.sizes[chosen])]
        assert torch.equal(batch["z"], torch.stack(expected))
        assert batch["dt"].unique().item() == pytest.approx(0.05 * stride)
        assert batch["stride"] == stride and batch["task"] == 0


def test_windows_of_a_history_hold_the_frames_before(tmp_path):
    cache = build(tmp_path)
    windows = LatentWindows([cache], 2, history=3)
    starts = starts_of(9 - 4).tolist()
    assert windows.sizes == [30 * len(starts)]
    batch = windows.__getitems__([(0, w, (0, w)) for w in range(windows.sizes[0])])
    whole = torch.cat(list(cache.z))
    expected = [whole[w // len(starts), starts[w % len(starts)]:][:5] for w in range(len(windows))]
    assert torch.equal(batch["z"], torch.stack(expected))


def test_several_tasks_are_padded_to_the_widest(tmp_path):
    caches = [build(tmp_path, "burgers1d"), build(tmp_path, "advection1d", 2, 3, ("nu", "beta"))]
    windows = LatentWindows(caches, length=4)
    assert windows.sizes == [30 * 19, 30 * 1]  # three frames: one window of two steps
    first = windows.__getitems__([(0, 0, (0, 3))])
    second = windows.__getitems__([(1, 0, (1, 3)), (1, 1, (1, 4))])
    assert first["z"].shape == (1, 5, 4, 3) and second["z"].shape == (2, 3, 4, 3)
    assert torch.equal(second["z"][..., :2], torch.cat(list(caches[1].z))[3:5])
    assert (second["z"][..., 2] == 0).all() and second["task"] == 1
    assert torch.allclose(first["cond"], torch.tensor([[0.01, 0.0]]))
    assert torch.allclose(second["cond"], torch.tensor([[0.04, 0.4], [0.05, 0.5]]))
    windows.move(torch.device("cpu"))
    assert torch.equal(windows.__getitems__([(1, 0, (1, 3)), (1, 1, (1, 4))])["z"], second["z"])


@pytest.mark.parametrize("stride", [1, 3])
def test_windows_of_a_cache_that_memory_does_not_hold_are_asked_for(tmp_path, monkeypatch, stride):
    monkeypatch.setattr(store, "SHARD_BYTES", 2000)
    cache, asked, kernel = build(tmp_path), [], module.KERNEL
    assert not LatentWindows([cache], 2).from_disk
    size = sum(z.nbytes for z in cache.z)
    monkeypatch.setattr(module, "free_memory", lambda: 2 * size - 1)
    windows = LatentWindows([cache], 2, strides=(stride,))

    def madvise(begin, size, how):
        assert how == mmap.MADV_WILLNEED and kernel.madvise(begin, size, how) == 0
        asked.append((begin.value, begin.value + size.value))

    monkeypatch.setattr(module, "KERNEL", SimpleNamespace(madvise=madvise))
    first = len(windows.starts[0]) * len(cache.z[0])  # window of the second shard
    windows.__getitems__([(0, 0, (0, first))])
    frames = cache.z[1][0, : 2 * stride + 1 : stride]
    assert len(asked) == (1 if stride == 1 else 3)
    for frame in frames:
        begin = frame.data_ptr()
        assert any(a <= begin and begin + frame.nbytes <= b for a, b in asked)
