"""`python -m ups.cache`: what is there, whose it is, whether it is whole, and what may go."""

import json
from pathlib import Path

import pytest
from cache_standins import FormulaFields, MatrixCodec, OneRank

from ups.cache.__main__ import main
from ups.cache.store import build_cache
from ups.config import UsageError
from ups.files import lock


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Path("runs/a/codec/burgers1d/model")
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"fingerprint": "f" * 64}))
    return [build_cache(OneRank(), MatrixCodec(), FormulaFields(), "train",
                        fingerprint=mark * 64).folder for mark in "fg"]


def test_ls_says_whose_a_cache_is(caches, capsys):
    (caches[1] / "shard-00000.safetensors").unlink()
    Path("cache/burgers1d-val-0123456789abcdef").mkdir()
    assert not main(["ls"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "float32 30 x 9 x 4 x 3" in lines[caches[0].name]
    assert "runs/a/codec/burgers1d" in lines[caches[0].name]
    assert "codec error" in lines[caches[0].name]
    assert "shard-00000.safetensors has 0 bytes" in lines[caches[1].name]
    assert "is no complete cache" in lines["burgers1d-val-0123456789abcdef"]
    assert "3 caches" in lines["3"]


def test_verify_reads_every_byte(caches, capsys):
    assert main(["verify"]) == 0
    path = caches[1] / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert main(["verify"]) == 1
    assert (f"{path.name} has changed since it was written: delete cache/{caches[1].name}, and"
            in capsys.readouterr().out)


def test_gc_removes_only_what_no_codec_can_read(caches, capsys):
    half = Path("cache/burgers1d-val-0123456789abcdef")
    half.mkdir()
    assert not main(["gc"])
    shown = capsys.readouterr().out
    assert caches[1].name in shown and half.name in shown and "--yes" in shown
    assert caches[0].name not in shown
    assert caches[1].exists() and half.exists()
    held = lock(half.with_name(half.name + ".lock"), "--cache")  # as a launch that builds it
    main(["gc", "--yes"])
    assert "is being built, left alone" in capsys.readouterr().out
    assert caches[0].exists() and not caches[1].exists() and half.exists()
    held.close()
    main(["gc", "--yes"])
    assert not half.exists() and caches[0].exists()


def test_gc_removes_nothing_but_caches(caches, capsys):
    foreign = {"notes": "a.txt", "burgers1d-val-1123456789abcdef": "notes.txt",
               "burgers1d-val-2123456789abcdef": "sub/shard-00000.safetensors",
               "burgers1d-val-0": "manifest.json"}
    for name, inside in foreign.items():
        Path("cache", name, inside).parent.mkdir(parents=True)
        Path("cache", name, inside).write_text("mine")
    Path("cache/burgers1d-val-3123456789abcdef").symlink_to(Path("cache/notes").absolute())
    parts = Path("cache/burgers1d-val-4123456789abcdef")
    parts.mkdir()
    for name in ("shard-00000.safetensors.77.partial", "shard-00001.safetensors",
                 "manifest.json.78.partial"):
        (parts / name).write_text("half")
    main(["gc", "--yes"])
    assert capsys.readouterr().out.count("is no cache, left alone") == 5
    assert all(Path("cache", name, inside).exists() for name, inside in foreign.items())
    assert not parts.exists() and not caches[1].exists() and caches[0].exists()


def test_gc_finds_codecs_at_any_depth_and_stops_where_it_cannot_tell(caches, tmp_path):
    Path("runs/a").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="no codec at all below --runs runs, so nothing"):
        main(["gc", "--yes"])
    with pytest.raises(UsageError, match="no codec at all below --runs none"):
        main(["gc", "--yes", "--runs", "none"])
    Path("runs/sweep").mkdir()
    Path("runs/sweep/a").symlink_to(tmp_path / "elsewhere")
    config = Path("runs/sweep/a/codec/burgers1d/model/config.json")
    good = config.read_text()
    config.write_text("{")
    with pytest.raises(UsageError, match="config.json is damaged"):
        main(["gc", "--yes"])
    assert caches[0].exists() and caches[1].exists()
    config.write_text(good)
    main(["gc", "--yes"])
    assert caches[0].exists() and not caches[1].exists()


def test_an_unknown_word_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ls", "gc"):
        with pytest.raises(UsageError, match="'extra' belongs to no flag"):
            main([name, "extra"])
    for name in ("ls", "gc", "verify"):
        with pytest.raises(UsageError, match="--cache cache: there is no such folder"):
            main([name])
    with pytest.raises(UsageError, match="remove: it is one of ls, verify, gc"):
        main(["remove"])
    with pytest.raises(UsageError, match="nearest is --yes"):
        main(["gc", "--yess"])
