"""--init: fine-tuning on other data, and training for longer."""

import json

import numpy as np
import pytest
import torch
from simulating import OPERATOR

import train_operator
from ups import Simulator
from ups.config import UsageError
from ups.data import write_fields
from ups.data.make import make
from ups.stages import load_codec, load_operator


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run on burgers1d at two viscosities, and data at a third, on a finer grid."""
    base = tmp_path_factory.mktemp("parent")
    make("burgers1d", out=base / "data", samples=24, grid=32, frames=9, nu=[0.02, 0.1])
    make("burgers1d", out=base / "other", samples=24, grid=64, frames=17, nu=[0.05])
    train(base, "parent", "--tasks", "burgers1d", "--steps", "120", "--lr", "1e-2")
    return base


def train(base, name, *flags, data="data"):
    train_operator.main(["--run", str(base / name), "--cache", str(base / "cache"),
                         *([] if data is None else ["--data", str(base / data)]), *OPERATOR,
                         "--eval_every", "1000", *flags])


def values(base, name, key="train/loss"):
    lines = (base / name / "operator" / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def test_other_data_begin_from_the_weights_codec_and_scales_of_the_parent(base, capsys):
    parent = base / "parent"
    for name, more in (("scratch", []), ("tuned", ["--init", str(parent)])):
        train(base, name, "--tasks", "burgers1d", *more, "--noise", "0", data="other")
    assert "the codec of" in capsys.readouterr().out
    assert values(base, "tuned")[0] < 0.7 * values(base, "scratch")[0]
    old, new = (load_operator(base / name) for name in ("parent", "tuned"))
    assert new.config["lineage"]["operator of parent"] == old.mark
    assert new.config["tasks"][0]["change"] == old.config["tasks"][0]["change"]
    assert new.config["tasks"][0]["tokens"] == [1, 1, 16] != old.config["tasks"][0]["tokens"]
    scales = [stage.config["fields"][0]["scales"][0] for stage in (old, new)]
    for key in ("log", "center", "width"):
        assert scales[0][key] == scales[1][key]
    assert scales[1]["low"] == scales[1]["high"] == 0.05
    codecs = [load_codec(base / name, "burgers1d")[0].state_dict()
              for name in ("parent", "tuned")]
    assert all(torch.equal(codecs[0][key], codecs[1][key]) for key in codecs[0] if key != "seen")
    u = Simulator.load(base / "tuned", "cpu").rollout(np.zeros((1, 1, 64), "float32"), 2)
    assert u.shape == (1, 2, 1, 64)


def test_training_longer_needs_the_parent_alone(base):
    with pytest.raises(UsageError, match=r"steps \(120 -> 200\).*--run and --init"):
        train(base, "parent", "--tasks", "burgers1d", "--steps", "200", "--lr", "1e-2")
    train(base, "longer", "--init", str(base / "parent"), "--lr", "1e-12", data=None)
    old, new = (load_operator(base / name) for name in ("parent", "longer"))
    assert new.config["tasks"] == old.config["tasks"]
    assert new.config["fields"] == old.config["fields"]
    scores = [values(base, name, "val/nrmse_rollout")[-1] for name in ("parent", "longer")]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)


def test_resume_is_exact(base, monkeypatch, capsys):
    flags = ["--init", str(base / "parent"), "--steps", "6", "--save_every", "3",
             "--strides", "1", "2"]
    train(base, "whole", *flags, data=None)
    said = f"burgers1d: {base / 'parent'} has learned strides [1], and this run learns [1, 2]."
    assert said in capsys.readouterr().out
    save = train_operator.Run.save

    def stop(run):
        save(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_operator.Run, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        train(base, "cut", *flags, data=None)
    monkeypatch.undo()
    train(base, "cut", *flags, data=None)
    whole, cut = (load_operator(base / name) for name in ("whole", "cut"))
    assert whole.mark == cut.mark and values(base, "whole") == values(base, "cut")


@pytest.mark.parametrize("flags, words", [
    (["--data", "wave"], "it knows u along x, and wave is h v along x; only a run on the"),
    (["--model.dim", "16"], "--model.dim 16: with --init .* it is that run's, 8; leave it out"),
    (["--init", "nowhere"], "no finished operator in nowhere/operator; give the folder of a run"),
    (["--run", ""], "name its folder by --run")])
def test_what_cannot_go_on_is_refused(base, flags, words):
    rng = np.random.default_rng(0)
    if not (base / "wave.h5").exists():
        write_fields(base / "wave.h5", rng.standard_normal((8, 5, 2, 32)), dt=0.1,
                     channels="h v", axes="x", boundary="periodic")
    first = ["--init", str(base / "parent")]
    flags = [str(base / "wave.h5") if flag == "wave" else flag for flag in flags]
    with pytest.raises(UsageError, match=words):
        train(base, "refused", *first, *flags, data=None)
