"""A stranger's folder or file runs no code, and makes us write, or read on and on, nowhere else.

Exports: tests/test_simulator.py; caches: tests/cache/test_store.py; HDF5 and NumPy files:
tests/data; no line of ours unpickles or evaluates: test_fault_rules.py.
"""

import json
import os
import pickle
import shutil
import sys
import types

import h5py
import numpy as np
import pytest
import toy

import train_operator
from ups.config import UsageError, parse
from ups.data.arrays import open_array
from ups.data.make import make
from ups.data.stores import opened
from ups.train.checkpoint import checkpoints, damage, load_model
from ups.train.run import RunConfig

CODE = "!!python/object/apply:os.mkdir [{path}]\n"


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("done")
    toy.main(["--run", str(folder)])
    return folder


@pytest.fixture
def run(done, tmp_path):
    """A run that is done, as somebody else may have sent it."""
    return shutil.copytree(done, tmp_path / "run") / "micro0"


def test_a_configuration_is_plain_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("run: " + CODE.format(path=tmp_path / "made"))
    with pytest.raises(UsageError, match="config.yaml"):
        parse(RunConfig, ["--config", str(file)])
    assert not (tmp_path / "made").exists()


def test_weights_are_no_pickle(run, tmp_path):
    with (run / "toy" / "model" / "model.safetensors").open("wb") as file:
        pickle.dump({"weights": Code(tmp_path / "made")}, file)
    with pytest.raises(UsageError, match="not readable"):
        load_model(run / "toy" / "model")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["/dev/zero", "../../../secret", "manifest.json"])
def test_a_manifest_names_no_other_file(run, name):
    """/dev/zero has the right size, 0, and no end."""
    newest = checkpoints(run / "toy" / "checkpoints")[0]
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest[name] = {"bytes": 0, "sha256": ""}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert damage(newest) == "manifest.json is foreign"


@pytest.mark.parametrize("place", ["toy/checkpoints", "toy/metrics.jsonl", "toy/wandb", "toy"])
def test_a_link_out_of_the_run_is_refused(run, tmp_path, capsys, place):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "kept").write_text("mine")
    (run / "toy" / "wandb").mkdir()
    (run / place).rename(tmp_path / "moved")
    (run / place).symlink_to(tmp_path / "else")
    with pytest.raises(UsageError, match="is a link to .*, outside of "):
        toy.main(["--run", str(tmp_path / "run")])
    assert [path.name for path in (tmp_path / "else").iterdir()] == ["kept"]
    (run / place).unlink()
    (tmp_path / "moved").rename(run / place)
    run.rename(tmp_path / "real")
    run.symlink_to(tmp_path / "real")  # the whole folder may lie on another disk
    toy.main(["--run", str(tmp_path / "run")])
    assert "is finished (step 8)" in capsys.readouterr().out


def test_a_codec_is_not_written_where_a_link_leads(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "else/burgers1d/model").mkdir(parents=True)  # a codec would replace it
    (tmp_path / "run/codec").symlink_to(tmp_path / "else")
    make("burgers1d", out=tmp_path / "data", samples=20, grid=32, frames=3)
    with pytest.raises(UsageError, match="codec/burgers1d/model is a link to .*, outside of "):
        train_operator.main(["--run", str(tmp_path / "run"), "--data", str(tmp_path / "data"),
                             "--cache", str(tmp_path / "cache")])
    assert not [*(tmp_path / "else/burgers1d/model").iterdir()]


@pytest.mark.parametrize("text", ["", "{}", "[]", "x", '{"place": 1, "kernel_kills": 2}'])
def test_a_lock_that_is_not_ours_says_nothing(run, capsys, text):
    (run / "toy" / "exit.json").unlink()
    (run / "toy" / ".lock").write_text(text)
    toy.main(["--run", str(run.parent)])
    assert "without a word" not in capsys.readouterr().err


def test_a_zarr_that_asks_for_a_pickle(tmp_path, monkeypatch):
    """Versions of numcodecs before 2026 obey; zarr itself need not be there."""
    known = {"pickle": Code, "blosc": None}
    zarr = {"open": lambda path, mode: dict(known), "Array": str}
    for name, module in {"zarr": zarr, "numcodecs": {}, "numcodecs.registry": {
            "codec_registry": known}}.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**module))
    (tmp_path / "a.zarr").mkdir()
    with opened(tmp_path / "a.zarr") as there:
        assert [*there] == ["blosc"]


def test_a_reference_to_another_object_is_no_parameter(tmp_path):
    """Links, storage and virtual data sets that leave the folder: tests/data/test_arrays.py."""
    with h5py.File(tmp_path / "mine.h5", "w") as file:
        u = file.create_dataset("u", data=np.random.default_rng(0).normal(size=(20, 5, 16)))
        file["nu"] = np.array([u.ref] * 20, dtype=h5py.ref_dtype)
        file.attrs["kappa"] = u.ref
    assert open_array(tmp_path / "mine.h5", "sample time x").facts.params == ()
