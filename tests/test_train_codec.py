"""The codec's script on tiny data: better than patch, used by the operator, equal on two ranks."""

import json

import pytest
from accelerate import Accelerator
from accelerate.utils import DistributedType
from launching import ROOT, launch

import train_codec
import train_operator
from ups.config import UsageError
from ups.data.make import make
from ups.stages import load_codec

TINY = ["--stride_x", "2", "--batch_size", "8", "--model.hidden", "16",
        "--model.depth", "1", "--points", "16", "--log_every", "1", "--warmup", "5",
        "--eval_every", "20", "--save_every", "20"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make("burgers1d", out=folder, samples=60, grid=128, frames=9, t_end=0.4)
    return folder


def flags(tmp_path, data, *more, run="run"):
    return ["--run", str(tmp_path / run), "--data", str(data), "--tasks", "burgers1d",
            "--cache", str(tmp_path / "cache"), *TINY, *map(str, more)]


def test_the_learned_codec_beats_patch_and_serves_the_operator(tmp_path, data):
    train_codec.main(flags(tmp_path, data, "--steps", 160, "--patch", 4, "--width", 1,
                           "--lr", 4e-3))
    stage = tmp_path / "run" / "codec" / "burgers1d"
    result = json.loads((stage / "test.json").read_text())["tasks"]["burgers1d"]
    assert result["compression"] == 4.0 and result["tokens"] == [16]
    assert result["nrmse_grid"] < 0.8 * result["nrmse_patch"] < 0.5
    assert (stage / "codec.png").stat().st_size > 10_000

    codec, mark = load_codec(tmp_path / "run", "burgers1d")
    assert codec.config["kind"] == "grid" and float(codec.weight.mean()) == pytest.approx(1.0)
    run = [*flags(tmp_path, data)[:10], "--steps", "4", "--batch_size", "8",
           "--val_trajectories", "2", "--model.dim", "16", "--model.depth", "2"]
    with pytest.raises(UsageError, match="with --codec.kind grid, .* and now --codec.kind patch"):
        train_operator.main(run)
    train_operator.main([*run, "--codec.kind", "grid"])
    config = json.loads((tmp_path / "run" / "operator" / "model" / "config.json").read_text())
    assert config["lineage"]["codec of burgers1d"] == mark
    assert config["tasks"][0]["width"] == 1
    floor = json.loads((tmp_path / "run" / "operator" / "test.json").read_text())
    floor = floor["tasks"]["burgers1d"]["forecasts"]["codec"]["scores"]["nrmse"]["all"]
    assert floor < 2 * result["nrmse_grid"]


def test_two_processes_give_the_same_curve(tmp_path, data):
    alone = flags(tmp_path, data, "--steps", 6)
    train_codec.main(alone)
    done = launch(ROOT / "train_codec.py", *flags(tmp_path, data, "--steps", 6, run="two"))
    assert done.returncode == 0, done.stderr
    curves = []
    for name in ("run", "two"):
        lines = (tmp_path / name / "codec" / "burgers1d" / "metrics.jsonl").read_text().splitlines()
        curves.append([x["train/loss"] for x in map(json.loads, lines) if "train/loss" in x])
    assert len(curves[0]) == len(curves[1]) == 6
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-5


def test_the_codec_of_an_operator_is_not_overwritten(tmp_path, data):
    config = tmp_path / "run" / "codec" / "burgers1d" / "model" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"kind": "patch"}')
    with pytest.raises(UsageError, match="holds the patch codec of this run's operator"):
        train_codec.main(flags(tmp_path, data))
    assert config.exists()


def test_fsdp_is_refused_in_one_sentence(tmp_path, data, monkeypatch):
    sharded = property(lambda accelerator: DistributedType.FSDP)
    monkeypatch.setattr(Accelerator, "distributed_type", sharded)
    with pytest.raises(UsageError, match="use accelerate_configs/2gpu.yaml"):
        train_codec.main(flags(tmp_path, data))


@pytest.mark.parametrize("more, words", [
    (["--tasks", "burgers1d", "advection1d"], "a codec belongs to one data set"),
    (["--width", "99"], "a patch of 8 values is compressed to 1 to 8"),
    (["--model.hidden", "10"], "--model.hidden 10 must be a multiple of 4"),
])
def test_wrong_use_is_one_sentence(tmp_path, data, more, words):
    with pytest.raises(UsageError) as caught:
        train_codec.main(flags(tmp_path, data, *more))
    assert words in str(caught.value) and "\n" not in str(caught.value)
