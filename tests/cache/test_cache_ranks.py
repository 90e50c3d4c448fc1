"""Two real processes: shared work, equal bytes, disjoint slices, and one outcome of a failure."""

from pathlib import Path

import pytest
import torch
from cache_standins import FormulaFields, MatrixCodec, OneRank, contents
from launching import launch

from ups.cache import store
from ups.cache.sampler import StepSampler
from ups.cache.store import build_cache
from ups.cache.windows import LatentWindows


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    out = launch(Path(__file__).with_name("two_ranks.py"), folder)
    assert out.returncode == 0, out.stderr[-3000:]
    seen = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    assert [one["processes"] for one in seen] == [2, 2]
    return folder, seen


def test_the_ranks_share_the_work_and_the_bytes_are_those_of_one_process(
        ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 2000)
    folder, seen = ranks
    fields = FormulaFields()
    alone = build_cache(OneRank(), MatrixCodec(), fields, "train", tmp_path)
    assert fields.reads == 15 and [one["reads"] for one in seen] == [8, 7]  # eight shards
    assert [one["reads_again"] for one in seen] == [8, 7]
    assert contents(folder / "cache" / alone.folder.name) == contents(alone.folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_ranks_get_disjoint_slices_of_the_global_batch(ranks, workers, tmp_path):
    windows = LatentWindows([build_cache(OneRank(), MatrixCodec(), FormulaFields(), "train",
                                         tmp_path)], length=2)
    sampler = StepSampler(windows.sizes, batch_size=6, steps=40, seed=1, start=4)
    mine, other = [one[f"batches_{workers}"] for one in ranks[1]]
    assert len(mine) == len(other) == len(sampler) == 36
    for step, (a, b) in enumerate(zip(mine, other, strict=True), start=4):
        assert a["step"] == b["step"] == step and a["task"] == b["task"] == 0
        assert a["rows"].tolist() == [0, 1, 2] and b["rows"].tolist() == [3, 4, 5]
        expected = windows.__getitems__(sampler.batch(step))
        for key in ("z", "cond", "dt", "rows"):
            assert torch.equal(torch.cat([a[key], b[key]]), expected[key])


def test_a_disk_full_for_one_rank_is_the_same_sentence_on_both(ranks):
    first, second = ranks[1]
    assert first["full"] == second["full"]
    assert "shard-00001.safetensors" in first["full"] and "File too large" in first["full"]
    assert max(first["full_seconds"], second["full_seconds"]) < 10
    assert first["after"] == second["after"] == 30  # and the next build succeeds


def test_a_fault_of_one_rank_ends_both(ranks):
    assert [one["broken"] for one in ranks[1]] == [
        "PeerFailed: no such number", "ZeroDivisionError: no such number"]
