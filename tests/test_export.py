"""An exported folder: the same roll-outs to the last bit, and a card that the hub can read."""

import json
import shutil

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from simulating import add_corrector, two_tasks

from ups import Simulator
from ups.config import UsageError
from ups.export import main


@pytest.fixture
def run(tmp_path_factory, tmp_path):
    shutil.copytree(two_tasks(tmp_path_factory.getbasetemp()), tmp_path / "run")
    return tmp_path / "run"


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


def test_the_folder_gives_the_same_rollouts_bit_for_bit(run, tmp_path, capsys):
    add_corrector(run, "diffusion")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "metrics.csv").write_text("task,score")
    (run / "evaluation" / "report.html").write_text("has paths of this machine")
    (run / "consistency").mkdir()  # begun and not finished: left out
    out = tmp_path / "some" / "model"
    main([str(run), "--out", str(out), "--license", "mit"])
    assert "hf upload USER/model" in capsys.readouterr().out
    for kind in ("is_file", "is_dir"):  # what all may read, and go into
        assert len({path.stat().st_mode for path in (run / "operator", run / "operator/config.json",
                    *out.rglob("*")) if getattr(path, kind)()}) == 1
    u0 = np.random.default_rng(0).standard_normal((2, 1, 32))
    ask = dict(steps=3, params={"nu": 0.02}, task="burgers1d")
    before, after = Simulator.load(run, "cpu"), Simulator.load(out, "cpu")
    assert np.array_equal(before.rollout(u0, **ask), after.rollout(u0, **ask))
    assert np.array_equal(before.rollout(u0, **ask, members=3), after.rollout(u0, **ask, members=3))
    names = set(files(out))
    assert {"README.md", "config.json", "evaluation/metrics.csv", "operator/exit.json",
            "codec/advection1d/model/model.safetensors"} <= names
    assert not [name for name in names if "checkpoints" in name or "consistency" in name]
    assert not [name for name, text in files(out).items() if str(tmp_path).encode() in text]


def test_the_card_has_the_front_matter_of_the_hub_and_the_measured_numbers(run, tmp_path):
    main([str(run), "--out", str(tmp_path / "model")])
    text = (tmp_path / "model" / "README.md").read_text()
    test = json.loads((run / "operator" / "test.json").read_text())["tasks"]
    data = ModelCard(text).data
    assert data.library_name == "ups" and data.model_name == "model"
    measured = {result.dataset_name: result.metric_value for result in data.eval_results}
    assert measured == {task: test[task]["nrmse_rollout"]["operator"] for task in test}
    assert yaml.safe_load(text.split("---")[1])["tags"][-2:] == ["burgers1d", "advection1d"]
    for result in test.values():
        row = [*result["nrmse"]["operator"], result["nrmse_rollout"]["operator"]]
        assert "| operator | " + " | ".join(f"{v:.3g}" for v in row) + " |\n" in text
    assert "given frames are not counted" in text and "(batch, 1, 32)" in text
    assert 'sim.rollout(u0, 40, task="burgers1d")' in text
    assert str(tmp_path) not in text


def test_the_card_takes_the_evaluation_where_there_is_one(run, tmp_path):
    (run / "evaluation").mkdir()
    mark = json.loads((run / "operator" / "model" / "config.json").read_text())["fingerprint"]
    score = {"scores": {"nrmse": {"all": 0.25, "by_lead": [0.1, 0.2, 0.3, 0.4, 0.5, None]},
                        "crps": {"all": 0.125}}, "members": 8, "calls": 2}
    about = {"lineage": {"operator": {"fingerprint": mark}}, "definitions": {
        "nrmse": "nRMSE = so and so", "crps": "CRPS = this and that"}, "tasks": {"burgers1d": {
            "steps": 6, "forecasts": {"shifted": score, "diffusion": score, "operator": score,
                                        "persistence": score | {"members": 1}}}}}
    path = run / "evaluation" / "metrics.json"
    path.write_text(json.dumps(about))
    main([str(run), "--out", str(tmp_path / "model")])
    text = (tmp_path / "model" / "README.md").read_text()
    assert """| burgers1d: nRMSE | step 1 | step 5 | all steps | CRPS | members | calls |
| --- | --- | --- | --- | --- | --- | --- |
| operator | 0.1 | 0.5 | 0.25 | 0.125 | 8 | 2 |
| diffusion | 0.1 | 0.5 | 0.25 | 0.125 | 8 | 2 |
| persistence | 0.1 | 0.5 | 0.25 | 0.125 | 1 | 0 |

nRMSE = so and so; CRPS = this and that.""" in text
    assert ModelCard(text).data.eval_results[0].metric_value == 0.25
    path.write_text(path.read_text().replace(mark, "another"))
    with pytest.raises(UsageError, match="run evaluate.py again"):
        main([str(run), "--out", str(tmp_path / "model")])


def test_an_earlier_export_is_replaced_and_nothing_else(run, tmp_path):
    out = tmp_path / "model"
    out.mkdir()  # empty: fine
    main([str(run), "--out", str(out)])
    (out / "README.md").write_text("old")
    main([str(run), "--out", str(out)])
    assert "model-index" in (out / "README.md").read_text()
    kept = files(run)
    for foreign in (run, tmp_path, run / "operator" / "exit.json"):
        with pytest.raises(UsageError, match="was not written by ups.export"):
            main([str(run), "--out", str(foreign)])
    assert files(run) == kept


def test_a_damaged_run_writes_nothing_and_a_damaged_copy_is_not_loaded(run, tmp_path):
    out = tmp_path / "model"
    main([str(run), "--out", str(out)])
    weights = out / "operator" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(UsageError, match="do not belong together"):
        Simulator.load(out)
    shutil.copy(weights, run / "operator" / "model")
    before = files(out)
    with pytest.raises(UsageError, match="do not belong together"):
        main([str(run), "--out", str(out)])
    assert files(out) == before and not list(tmp_path.glob("*.partial"))
