"""The three generators on the run that an operator left: hand-over, numbers, faults."""

import json
import shutil

import pytest
import torch
from launching import ROOT, launch

import train_consistency
import train_diffusion
import train_ensemble
import train_operator
from ups.config import UsageError
from ups.data.make import make
from ups.eval.choices import STRENGTHS
from ups.stages import inherit, load_generator, load_operator, preferred
from ups.train.run import RunConfig

SIZES = ["--model.dim", "16", "--model.depth", "2", "--model.modes", "4"]
TINY = ["--steps", "8", "--batch_size", "8", "--log_every", "1", "--eval_every", "8",
        "--save_every", "4", "--warmup", "2"]
DRAWS = [*TINY, "--members", "3"]
STAGES = {"ensemble": (train_ensemble, [*DRAWS, "--draws", "2", "--length", "2"]),
          "diffusion": (train_diffusion, [*DRAWS, *SIZES, "--calls", "3"]),
          "consistency": (train_consistency, DRAWS)}
LOSS = {"ensemble": "ensemble_loss", "diffusion": "diffusion_loss", "consistency": "student_loss"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of two tasks of different widths, with a history, through all stages."""
    folder = tmp_path_factory.mktemp("base")
    make("burgers1d", out=folder / "data", samples=60, grid=32, frames=8, t_end=0.4)
    make("diffreact2d", out=folder / "data", samples=40, grid=16, frames=14, t_end=1.0)
    where = ["--data", str(folder / "data"), "--cache", str(folder / "cache")]
    train_operator.main(["--run", str(folder / "run"), *where, *TINY, *SIZES, "--tasks",
                         "burgers1d", "diffreact2d", "--steps", "40", "--history", "2"])
    for script, flags in STAGES.values():
        script.main(["--run", str(folder / "run"), *flags])  # data and cache are the operator's
    return folder


def copied(base, tmp_path, *stages):
    """The run of `base` with some of its stages."""
    for part in ("codec", "operator", *stages):
        shutil.copytree(base / "run" / part, tmp_path / "run" / part)
    return str(tmp_path / "run")


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_a_cache_is_made_where_a_run_says_only_if_one_is_there(base, tmp_path):
    operator = load_operator(base / "run")
    assert inherit(RunConfig(run="r"), operator).cache == str(base / "cache")
    assert inherit(RunConfig(run="r", cache="mine"), operator).cache == "mine"
    operator.settings.cache = str(tmp_path)  # a stranger's word
    assert inherit(RunConfig(run="r"), operator).cache == "cache"


@pytest.mark.parametrize("stage", STAGES)
def test_the_scores_are_what_they_say(base, stage):
    folder = base / "run" / stage
    assert json.loads((folder / "exit.json").read_text())["status"] == "done"
    test = json.loads((folder / "test.json").read_text())
    assert "M (M - 1)" in test["definitions"]["crps"] and test["split"] == "test"
    operator = json.loads((base / "run" / "operator" / "test.json").read_text())
    for task, result in test["tasks"].items():
        alone = result["forecasts"]["operator"]["scores"]
        assert result["trajectories"] == operator["tasks"][task]["trajectories"]
        assert alone["nrmse"]["all"] == pytest.approx(
            operator["tasks"][task]["forecasts"]["operator"]["scores"]["nrmse"]["all"], rel=1e-5)
        drawn = {name: one for name, one in result["forecasts"].items() if name != "operator"}
        assert [*drawn] == ["perturbed", "dressing", *["diffusion"] * (stage == "consistency"),
                            stage]
        for one in drawn.values():
            assert one["members"] == 3 and one["milliseconds"] > 0
            scores = one["scores"]
            assert all(value > 0 for value in scores["spread_skill"]["by_lead"])
            assert 0 < scores["coverage_50"]["all"] < scores["coverage_90"]["all"] < 1
        assert (folder / f"ensemble_{task}.png").stat().st_size > 20_000
        chosen = {name: json.loads((base / "run" / name / "choices.json").read_text())[task]
                  for name in ("operator", *STAGES)}
        best = min(chosen, key=lambda name: chosen[name]["crps_ratio"])
        assert preferred(base / "run", task) == best
        assert chosen[stage]["perturbation"] in (0.0, chosen["operator"]["perturbation"])
        assert chosen[stage]["strength"] in STRENGTHS


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_give_the_same_curve(base, tmp_path, stage):
    run = copied(base, tmp_path, *list(STAGES)[:list(STAGES).index(stage)])
    done = launch(ROOT / f"train_{stage}.py", "--run", run, *STAGES[stage][1])
    assert done.returncode == 0, done.stderr
    one, two = (metrics(folder / "run" / stage) for folder in (base, tmp_path))
    assert len(one) == len(two) == 8
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5
    a, b = (json.loads((folder / "run" / stage / "test.json").read_text())["tasks"]
            for folder in (base, tmp_path))
    for task in a:
        ours, theirs = (one[task]["forecasts"][stage]["scores"]["crps"] for one in (a, b))
        assert ours["by_lead"] == pytest.approx(theirs["by_lead"], rel=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_bit_for_bit_and_memory_faults_change_nothing(base, tmp_path, monkeypatch, stage):
    """From the checkpoint in the middle; with memory that runs out once on the way."""
    run = copied(base, tmp_path, *STAGES)
    script, flags = STAGES[stage]
    folder = tmp_path / "run" / stage
    whole = (folder / "model" / "model.safetensors").read_bytes()

    def half():
        (folder / "exit.json").unlink()
        shutil.rmtree(folder / "checkpoints" / "step_8")

    monkeypatch.setattr(script, "finish_ensembles", lambda *args: None)
    half()
    script.main(["--run", run, *flags])
    assert (folder / "model" / "model.safetensors").read_bytes() == whole
    curve = metrics(folder)
    name = LOSS[stage]
    real, left = getattr(script, name), [torch.OutOfMemoryError("CUDA out of memory (a test)")]

    def loss(model, batch, **options):
        if left:
            raise left.pop()
        return real(model, batch, **options)

    monkeypatch.setattr(script, name, loss)
    half()
    script.main(["--run", run, *flags])
    again = metrics(folder)
    assert not left and len(again) == 8
    assert max(abs(a - b) for a, b in zip(curve, again, strict=True)) < 1e-5


def test_lineage_is_kept_and_foreign_stages_are_refused(base, tmp_path):
    operator = load_operator(base / "run")
    ensemble, teacher, student = (load_generator(base / "run", stage, operator)
                                  for stage in STAGES)
    assert ensemble.config["lineage"]["operator"] == operator.mark
    assert student.config["lineage"]["diffusion"] == teacher.mark
    assert student.config["lineage"]["operator"] == operator.mark
    assert (teacher.model.kind, student.model.kind) == ("diffusion", "consistency")
    assert (teacher.model.calls, student.model.calls) == (3, 2)
    with pytest.raises(UsageError, match="train it first with .*train_operator.py"):
        train_diffusion.main(["--run", str(tmp_path / "empty"), *STAGES["diffusion"][1]])
    run = copied(base, tmp_path)
    with pytest.raises(UsageError, match="no data set burgers1d in"):
        train_diffusion.main(["--run", run, "--data", str(tmp_path / "elsewhere")])
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UsageError, match="--data holds burgers1d, and .* burgers1d, diffreact2d, "):
        train_ensemble.main(["--run", run, "--tasks", "burgers1d"])
    with pytest.raises(UsageError, match="train it first with .*train_diffusion.py"):
        train_consistency.main(["--run", run, *STAGES["consistency"][1]])
    for parent, stage in (("operator", "diffusion"), ("diffusion", "consistency")):
        shutil.copytree(base / "run" / stage, tmp_path / "run" / stage)
        path = tmp_path / "run" / parent / "model" / "config.json"
        text = path.read_text()
        path.write_text(json.dumps(json.loads(text) | {"fingerprint": "another"}))
        with pytest.raises(UsageError, match=f"trained for another {parent}"):
            load_generator(run, stage, operator)
        path.write_text(text)
    shutil.rmtree(tmp_path / "run" / "diffusion")
    end = tmp_path / "run" / "operator" / "exit.json"
    end.write_text(json.dumps({"status": "stopped", "step": 3, "reason": ""}))
    with pytest.raises(UsageError, match="not finished .*stopped.*--config"):
        train_diffusion.main(["--run", run, *STAGES["diffusion"][1]])
    with pytest.raises(UsageError, match="--calls must be between 1 and 2, not 3"):
        train_consistency.main(["--run", run, "--calls", "3"])
