"""A cache holds what the codec says, under a key of all that it depends on, by memory map."""

import json
import shutil

import pytest
import torch
from cache_standins import FormulaFields, MatrixCodec, OneRank, contents

from ups.cache import store
from ups.cache.store import DTYPES, build_cache, open_cache, verify
from ups.config import UsageError


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 4000)  # nine trajectories of 9 x 4 x 3 float32


def build(root, fields=None, codec=None, split="train", **options):
    options = {"fingerprint": "f" * 64} | options
    return build_cache(OneRank(), codec or MatrixCodec(), fields or FormulaFields(), split, root,
                       **options)


def values(cache):
    return torch.cat(list(cache.z)).float()


@pytest.mark.parametrize("dtype, bound", [("float32", 0), ("float16", 5e-4), ("bfloat16", 4e-3)])
def test_latents_errors_and_parameters_are_the_codecs(tmp_path, dtype, bound):
    fields, codec = FormulaFields(), MatrixCodec()
    cache = build(tmp_path, fields, codec, dtype=dtype)
    u = fields.read(torch.arange(30))
    z = codec.encode(u.flatten(0, 1)).unflatten(0, (30, 9))
    assert cache.shape == (30, 9, 4, 3) and [len(part) for part in cache.z] == (
        [9, 9, 9, 3] if dtype == "float32" else [18, 12])
    assert cache.z[0].dtype == DTYPES[dtype]
    assert (values(cache) - z).abs().max() <= bound * z.abs().max()
    p = codec.decode(values(cache).flatten(0, 1)).unflatten(0, (30, 9))
    error = ((p - u).norm(dim=-1) / u.norm(dim=-1)).mean((1, 2))
    assert torch.allclose(cache.error, error, rtol=1e-4) and cache.error.min() > 0.01
    assert torch.equal(cache.params, fields.params(torch.arange(30)))
    assert cache.manifest["indices"] == list(range(30)) and cache.facts.dt == 0.05


def test_a_channel_that_is_zero_has_no_relative_error(tmp_path):
    class Steady(FormulaFields):  # (a, 0) and (a, u), as a steady task has
        def read(self, indices):
            u = super().read(indices)
            u[:, 0, 1] = 0
            return u

    codec = MatrixCodec(channels=2, width=8)  # complete: the error is rounding
    cache = build(tmp_path, Steady(frames=2, channels=2), codec)
    assert 0 < cache.error.max() < 1e-6


def test_a_second_call_reads_no_field_and_another_key_is_another_folder(tmp_path):
    fields = FormulaFields()
    first = build(tmp_path, fields)
    reads = fields.reads
    assert reads > 0
    assert build(tmp_path, fields).folder == first.folder and fields.reads == reads
    others = {"data": FormulaFields(), "stride": FormulaFields(), "first": FormulaFields()}
    others["data"].digest = "e" * 64
    others["stride"].stride_x = 2
    others["first"].frames = range(1, 10)
    folders = [build(tmp_path, other).folder for other in others.values()]
    folders += [build(tmp_path, dtype="float16").folder, build(tmp_path, split="val").folder,
                build(tmp_path, fingerprint="g" * 64).folder, first.folder]
    assert len(set(folders)) == 7
    assert first.folder.name == f"burgers1d-train-{first.manifest['key']}"


def test_wrong_use_is_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="float64: it is one of float32, float16, bfloat16"):
        build(tmp_path, dtype="float64")

    class Broken(FormulaFields):
        def read(self, indices):
            return super().read(indices).index_fill(0, (indices == 7).nonzero()[:, 0], torch.nan)

    with pytest.raises(UsageError, match="trajectory 7 has no finite latents in float32"):
        build(tmp_path, Broken())
    assert list(tmp_path.glob("*/manifest.json")) == []


def test_tensors_are_mapped_files_and_cost_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 2**28)
    fields = FormulaFields(grid=4096, frames=200)  # 30 x 200 x 1024 x 3 float32: 74 MB
    folder = build(tmp_path, fields, MatrixCodec(grid=4096)).folder

    def anonymous():
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Anonymous")) / 1e3

    before = anonymous()
    cache = open_cache(folder)
    assert cache.z[0].sum() != 0  # every page is read
    assert anonymous() - before < 10
    start, path = cache.z[0].data_ptr(), str(folder / "shard-00000.safetensors")
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file if line.rstrip().endswith(path)]
    assert any(int(low, 16) <= start < int(high, 16) for low, high in spans)


def truncated(folder):
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def foreign(folder):
    other = build(folder.parent, fingerprint="g" * 64).folder
    shutil.copy(other / "shard-00001.safetensors", folder)


def header(folder):
    path = folder / "shard-00001.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def other_version(folder):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    manifest["identity"]["version"] = 99
    path.write_bytes(store._json(manifest | {"checksum": store._sha256(store._json(manifest))}))


def other_manifest(folder):
    other = build(folder.parent, fingerprint="g" * 64).folder
    shutil.copy(other / "manifest.json", folder)


def flipped_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"params": [[0.01]', '"params": [[0.02]'))


@pytest.mark.parametrize("damage, sentence", [
    (truncated, r"shard-00001.safetensors has \d+ bytes instead of \d+"),
    (foreign, "shard-00001.safetensors belongs to another codec or data"),
    (header, "shard-00001.safetensors is damaged"),
    (other_version, "manifest.json is damaged, or of another version than 1"),
    (other_manifest, "manifest.json belongs to another codec or data"),
    (flipped_manifest, "manifest.json is damaged"),
])
def test_damage_is_named_on_opening_with_its_cure(tmp_path, damage, sentence):
    folder = build(tmp_path).folder
    before = contents(folder)
    damage(folder)
    assert contents(folder) != before
    with pytest.raises(UsageError, match=f"{sentence}.*: delete {folder}, and") as caught:
        build(tmp_path)
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
    build(tmp_path)
    assert contents(folder) == before and verify(folder) == []


def test_a_flipped_byte_is_named_by_verify(tmp_path):
    folder = build(tmp_path).folder
    path = folder / "shard-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    open_cache(folder)  # sizes and headers are right
    fault, = verify(folder)
    assert f"shard-00002.safetensors has changed since it was written: delete {folder}" in fault
