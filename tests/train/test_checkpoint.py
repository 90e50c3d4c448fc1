"""Damage of every kind is found, the checkpoint before it is taken, nothing foreign is resumed."""

import json
import resource
import shutil

import pytest
import torch
import toy
from accelerate import Accelerator
from safetensors.torch import load_file

from ups.config import RunError, UsageError
from ups.files import write_json
from ups.train.checkpoint import (
    checkpoints,
    damage,
    export_model,
    fingerprint,
    load_model,
    read_checkpoint,
    restore_state,
    write_checkpoint,
)
from ups.train.ema import EMA
from ups.train.tracking import Metrics


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped bit": lambda c: flip(c / "state.safetensors"),
    "truncated": lambda c: (c / "state.safetensors").write_bytes(
        (c / "state.safetensors").read_bytes()[:-8]),
    "no manifest": lambda c: (c / "manifest.json").unlink(),
    "other state": lambda c: (c / "state.json").write_text(
        (c / "state.json").read_text().replace('"step": 8', '"step": 9')),
    "empty manifest": lambda c: (c / "manifest.json").write_text("{}"),
}


def again(folder, copy):
    """A copy of a run that is not finished: what is resumed, and its stage."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    (copy / "micro0" / "toy" / "exit.json").unlink()
    return copy / "micro0" / "toy"


def weights(folder):
    tensors = load_file(folder / "micro0" / "rank0.safetensors")
    return {name: t.tolist() for name, t in tensors.items() if name.startswith("model/")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    toy.main(["--run", str(folder), "--keep", "3"])
    return folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(finished, tmp_path, kind, capsys):
    newest, before = checkpoints(again(finished, tmp_path) / "checkpoints")[:2]
    assert (newest.name, before.name) == ("step_8", "step_6")
    assert damage(newest) is None
    DAMAGES[kind](newest)
    assert damage(newest)
    toy.main(["--run", str(tmp_path), "--keep", "3"])
    said = capsys.readouterr()
    assert "step_8 is damaged" in said.err and "resuming from" in said.out and "step_6" in said.out
    assert weights(tmp_path) == weights(finished)
    assert damage(newest) is None  # written anew


def test_a_folder_without_its_configuration_is_refused(finished, tmp_path):
    (again(finished, tmp_path) / "config.json").unlink()
    with pytest.raises(UsageError, match="toy has no config.json, so nobody knows"):
        toy.main(["--run", str(tmp_path), "--keep", "3"])


def test_an_end_after_the_last_step_is_recorded_and_can_be_repeated(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    def interrupted(*args):
        raise KeyboardInterrupt

    end = tmp_path / "micro0" / "toy" / "exit.json"
    with monkeypatch.context() as patch:
        patch.setattr("ups.train.run.export_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            toy.main(["--run", str(tmp_path)])
        assert json.loads(end.read_text())["status"] == "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("ups.train.checkpoint.save_file", full)
        with pytest.raises(RunError, match="make room and run the same command again"):
            toy.main(["--run", str(tmp_path)])
        assert json.loads(end.read_text())["status"] == "failed"
        patch.setattr("ups.train.run.write_json", full)  # exit.json does not fit either
        with pytest.raises(RunError, match="make room and run the same command again"):
            toy.main(["--run", str(tmp_path)])
    toy.main(["--run", str(tmp_path)])
    assert json.loads(end.read_text())["status"] == "done"


def test_systems_choices_may_change_and_a_finished_run_says_so(finished, capsys):
    toy.main(["--run", str(finished), "--log_every", "2"])
    assert "is finished (step 8)" in capsys.readouterr().out


def test_another_lineage_is_refused(finished, tmp_path):
    newest = checkpoints(again(finished, tmp_path) / "checkpoints")[0]
    tensors, state = read_checkpoint(newest)
    state["lineage"]["data"] = "eight"
    write_checkpoint(newest.parent, state["step"], tensors, state, keep=3)
    with pytest.raises(UsageError, match="was trained on another data"):
        toy.main(["--run", str(tmp_path)])


def test_pruning_keeps_the_newest_and_what_was_just_written(tmp_path):
    def write(*steps, keep):
        for step in steps:
            write_checkpoint(tmp_path, step, {"a": torch.ones(1)}, {"step": step}, keep=keep)

    def names():
        return [folder.name for folder in checkpoints(tmp_path)]

    write(1, 2, 3, 10, keep=2)
    (tmp_path / "step_11.partial").mkdir()  # no checkpoint
    assert names() == ["step_10", "step_3"]
    flip(tmp_path / "step_10" / "state.safetensors")  # so a run goes on from before it
    write(5, 6, keep=1)
    assert names() == ["step_10", "step_6"] and damage(tmp_path / "step_6") is None


@pytest.mark.parametrize("given, then", [(6, 3), (12, 6)])
def test_a_micro_batch_that_fitted_is_kept_unless_another_is_asked_for(tmp_path, given, then):
    argv = ["--run", str(tmp_path), "--steps", "6", "--variants", "6"]
    toy.main(argv)
    stage = tmp_path / "micro6" / "toy"
    shutil.rmtree(stage / "checkpoints" / "step_6")
    (stage / "exit.json").unlink()
    tensors, state = read_checkpoint(stage / "checkpoints" / "step_3")
    before = state["seconds"]
    state |= {"micro_batch": 3, "oom_splits": 1}  # memory had run out, with so many rows:
    state["config"]["micro_batch"] = given
    write_checkpoint(stage / "checkpoints", 3, tensors, state, keep=3)
    toy.main(argv)
    _, state = read_checkpoint(stage / "checkpoints" / "step_6")
    assert state["micro_batch"] == then and state["oom_splits"] == 1
    end = json.loads((stage / "exit.json").read_text())
    assert 0 < before < state["seconds"] < end["seconds"]  # of both launches


def test_an_exported_model_knows_its_fingerprint(tmp_path):
    tensors = {"w": torch.randn(3, 2), "s": torch.tensor(1.5)}
    export_model(tmp_path / "model", tensors, {"dim": 3})
    mark = fingerprint(tensors, {"dim": 3})
    config, loaded = load_model(tmp_path / "model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert config == {"dim": 3, "fingerprint": mark} and len(modes) == 1  # all may read it
    assert all(torch.equal(loaded[k], tensors[k]) for k in tensors)
    assert fingerprint(tensors, {"dim": 4}) != mark
    assert fingerprint({**tensors, "w": tensors["w"].double()}, {"dim": 3}) != mark
    (tmp_path / "model" / "config.json").write_text(json.dumps({"dim": 4, "fingerprint": mark}))
    with pytest.raises(UsageError, match="together; put back a sound copy, or remove"):
        load_model(tmp_path / "model")
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "model" / name).unlink()
        with pytest.raises(UsageError, match=f"no trained model here .{name} is missing"):
            load_model(tmp_path / "model")
    with pytest.raises(UsageError, match="config.json is missing"):
        load_model(tmp_path / "absent")


def test_metrics_are_cut_back_and_a_torn_line_is_dropped(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step in range(5):
        metrics.write(step, {"loss": step / 3})
    with metrics.path.open("a") as file:
        file.write('\0\0{"step": 5}\n{"lo": 1}\n7\n{"step": 5, "lo')  # of a crash of the machine
    metrics.cut(2)
    assert metrics.read() == [{"step": step, "loss": step / 3} for step in range(3)]


def test_a_disk_that_is_full_says_where(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large: '.*/test.json'"):
            write_json(tmp_path / "test.json", "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.iterdir()]


def test_weights_of_another_version_are_refused_in_one_sentence():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for tensors, name in (({"model/weight": torch.zeros(2, 2)}, "bias"),
                          ({"model/weight": torch.zeros(3, 2)}, "weight")):
        with pytest.raises(UsageError, match=f"no such {name}: another version of the model"):
            restore_state(Accelerator(cpu=True), tensors, [], model, optimizer, EMA(model, 0.9))
    assert float(model.weight.detach().abs().sum()) > 0  # nothing was touched
