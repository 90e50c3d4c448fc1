"""The evaluation of a whole run: its numbers, its files, its refusals, and the table over runs."""

import json
import re
import shutil

import h5py
import pytest
import torch
from accelerate import Accelerator
from launching import ROOT, launch

import evaluate
import train_diffusion
import train_operator
from ups.config import UsageError
from ups.data.find import open_fields
from ups.data.make import make
from ups.eval.report import write_report
from ups.stages import load_operator
from ups.train.checkpoint import export_model, load_model

SIZES = ["--model.dim", "16", "--model.depth", "2", "--model.modes", "4"]
TINY = ["--steps", "4", "--batch_size", "8", "--eval_every", "4", "--save_every", "4",
        "--warmup", "2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of two tasks, one a family of two parameters, with a generator; evaluated."""
    folder = tmp_path_factory.mktemp("base")
    make("burgers1d", out=folder / "data", samples=40, grid=32, frames=13, t_end=0.6,
         nu=[0.01, 0.1])
    make("diffreact2d", out=folder / "data", samples=20, grid=16, frames=14, t_end=1.0)
    run = ["--run", str(folder / "run")]
    train_operator.main([*run, "--data", str(folder / "data"), "--cache", str(folder / "cache"),
                         *TINY, *SIZES, "--tasks", "burgers1d", "diffreact2d", "--steps", "30"])
    train_diffusion.main([*run, *TINY, *SIZES, "--members", "3", "--calls", "3"])
    fields = open_fields("diffreact2d", folder / "data")
    chosen = fields.split("test")
    with h5py.File(fields.files[0].path.with_suffix(".truth"), "w") as f:
        u = fields.read(chosen)[:, [1, 3], None]
        f["trajectory"], f["lead"] = chosen, [1, 3]
        f["u"] = u + 0.01 * torch.randn(len(chosen), 2, 8, *u.shape[3:])
    evaluate.main(run)
    return folder


def results(run, folder="evaluation"):
    return json.loads((run / folder / "metrics.json").read_text())


def copied(base, tmp_path, *stages):
    for part in ("codec", "operator", *stages):
        shutil.copytree(base / "run" / part, tmp_path / "run" / part)
    return tmp_path / "run"


def test_numbers_are_those_that_the_stages_reported(base):
    about, stages = results(base / "run"), ("operator", "diffusion")
    tests = {s: json.loads((base / "run" / s / "test.json").read_text())["tasks"] for s in stages}
    for task, result in about["tasks"].items():
        ours, theirs = result["forecasts"], tests["operator"][task]
        assert result["trajectories"] == theirs["trajectories"]
        for name in ("operator", "persistence", "codec", "one_step"):
            score = ours[name]["scores"]["nrmse"]
            assert score["all"] == pytest.approx(
                theirs["forecasts"][name]["scores"]["nrmse"]["all"], rel=1e-4)
            low, high = score["interval"]
            assert low <= score["all"] <= high and len(score["by_lead"]) == result["steps"]
        plan, = result["plans"]
        assert plan["longest"] == 1 and min(plan["seconds_last"], plan["seconds_all"]) > 0
        own, before = (found["operator"]["scores"] for found in (ours, theirs["forecasts"]))
        assert plan["nrmse_all"] == pytest.approx(own["nrmse"]["all"], rel=1e-4)
        if result["conserved"]:
            assert own["drift"]["all"] == pytest.approx(before["drift"]["all"], rel=1e-3, abs=1e-6)
        told = tests["diffusion"][task]["forecasts"]  # the same members, drawn by other code
        for name in ("diffusion", "perturbed", "dressing"):
            for score in ("crps", "spread_skill", "nrmse", "sample_nrmse", "spectrum_error"):
                assert ours[name]["scores"][score]["by_lead"] == pytest.approx(
                    told[name]["scores"][score]["by_lead"], rel=1e-3), score
        ranks, scores = (ours["diffusion"][key] for key in ("rank", "scores"))
        assert len(ranks) == 4 and sum(ranks) == pytest.approx(1)
        assert scores["crps_ratio"]["all"] == pytest.approx(
            scores["crps"]["all"] / own["crps"]["all"])
    assert "shuffled" in about["tasks"]["burgers1d"]["forecasts"]
    forecasts = about["tasks"]["diffreact2d"]["forecasts"]
    assert not {"shuffled", "shifted"} & {*forecasts}
    own = forecasts["operator"]["scores"]["nrmse"]
    u, v = own["by_channel"]
    assert u != v and (u + v) / 2 == pytest.approx(own["all"])


def test_every_file_carries_the_definitions(base):
    folder, about = base / "run" / "evaluation", results(base / "run")
    known = {name for names in about["definitions"] for name in names.split(", ")}
    for name in about["tasks"]["burgers1d"]["forecasts"]["diffusion"]["scores"]:
        assert name in known or name.rpartition("_")[0] in known, name
    page = (folder / "report.html").read_text()
    assert page.count("<h2>") == 3 and "Lineage" in page  # two tasks, and how it was made
    assert about["lineage"]["operator"]["fingerprint"] in page
    assert re.search(r"fair CRPS = mean over members", page)
    assert "against_truth" not in about["tasks"]["burgers1d"]  # a truth lies beside the other
    truth = about["tasks"]["diffreact2d"]["against_truth"]
    names = {"operator", "diffusion", "perturbed", "dressing"}
    assert truth["leads"] == [1, 3] and truth["scores"].keys() == names
    assert all(1 < score < 1e4 for one in truth["scores"].values() for score in one["crps"])
    assert page.count("solver's own ensemble") == 5


def test_a_failure_leaves_the_report(base, tmp_path, monkeypatch):
    folder = shutil.copytree(base / "run" / "evaluation", tmp_path / "evaluation")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert set(before) == {"metrics.json", "report.html"}
    monkeypatch.setattr("ups.eval.report.page", lambda about, pictures: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(folder, results(base / "run"), {})
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_two_processes_give_identical_numbers(base, tmp_path):
    run = copied(base, tmp_path, "diffusion")
    done = launch(ROOT / "evaluate.py", "--run", run)
    assert done.returncode == 0, done.stderr
    one, two = results(base / "run"), results(run)
    assert two["made_with"]["processes"] == 2
    for task, result in two["tasks"].items():
        for name, forecast in result["forecasts"].items():
            same = one["tasks"][task]["forecasts"][name]
            assert forecast["scores"] == same["scores"], (task, name)


def test_pdebench_starts_from_the_tenth_frame_and_it_says_when_the_operator_pays(
        base, tmp_path, capsys, monkeypatch):
    for draw in ("film", "render"):
        monkeypatch.setattr(f"ups.eval.report.{draw}", lambda *args, **kind: b"")
    run = copied(base, tmp_path)
    evaluate.main(["--run", str(run), "--protocol", "pdebench", "--solver_seconds", "1000"])
    about = results(run, "evaluation_pdebench")
    result = about["tasks"]["burgers1d"]
    assert result["steps"] == 3 and "10 frames given" in result["protocol"]
    assert about["tasks"]["diffreact2d"]["steps"] == 4  # stored frame 9, of which 10 .. 13 count
    operator = load_operator(run)
    cfg = evaluate.Config(run=str(run))
    task = evaluate.open_data(Accelerator(cpu=True), cfg, operator)[0]
    chosen = task.fields.split("test")
    u = task.fields.read(chosen)
    z, dt = [task.encode(u[:, 9])], torch.full((len(u),), task.fields.facts.dt)
    for _ in range(3):
        z.append(operator.model(z[-1], dt, task.cond(chosen)))
    p = torch.stack([task.decode(frame) for frame in z[1:]], 1)
    error = ((p - u[:, 10:]).square().sum((2, 3)) / u[:, 10:].square().sum((2, 3))).sqrt()
    assert result["forecasts"]["operator"]["scores"]["nrmse"]["by_lead"] == pytest.approx(
        error.mean(0).tolist(), rel=1e-4)

    train = json.loads((run / "operator" / "exit.json").read_text())["seconds"]
    for task, samples in (("burgers1d", 72), ("diffreact2d", 18)):  # without those of the test
        line = about["tasks"][task]["pays"]
        assert line in (run / "evaluation_pdebench" / "report.html").read_text()
        after = int(re.match(r"pays after ([\d,]+) trajectories", line)[1].replace(",", ""))
        assert after == pytest.approx(samples + train / 1000, rel=0.01, abs=0.6)
    assert line in capsys.readouterr().out
    assert evaluate.pays(100, 0.5, 60.0, 0.7) == (
        "never pays: the operator takes 0.7 s a trajectory, the solver 0.5 s")


def test_one_of_two_data_sets_leaves_the_report_of_both(base, monkeypatch):
    written, every = [], evaluate.open_data
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: ({}, {}))
    monkeypatch.setattr(evaluate, "write_report", lambda folder, *args: written.append(folder.name))
    for count in (1, 2):
        monkeypatch.setattr(evaluate, "open_data", lambda *args, n=count: every(*args)[:n])
        evaluate.main(["--run", str(base / "run")])
    assert written == ["evaluation_partial", "evaluation"]


def other_weights(folder):
    """Replace an exported model by one of the same sizes, sound in itself."""
    config, tensors = load_model(folder)
    del config["fingerprint"]
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    export_model(folder, tensors | {name: tensors[name] + 1}, config)


@pytest.mark.parametrize("how, flags, words", [
    ("name", ["--run", "{run}s"], "there is no run .*runs; the nearest is .*run"),
    ("no operator", [], "there is no such stage yet; train it first with .*train_operator.py"),
    ("stopped", [], "is not finished .*stopped.*train_operator.py --run .*run --config .*/config"),
    ("short", ["--protocol", "pdebench"], "has 13 frames at --stride_t 1; .*gives 13 of them"),
    ("no codec", [], "codec/burgers1d.* is missing.; put back a"),
    ("no config", [], "operator has no config.json; put it back"),
    ("no fine", [], "operator was written by another version of the model"),
    ("other data", ["--data", "{run}/nothing"], "no data set burgers1d in .*nothing"),
    ("default data", ["--data", "data"], "no data set burgers1d in data"),
    ("other codec", [], "is not the codec that .* was trained with"),
    ("other operator", [], "trained for another operator"),
    ("protocol", ["--protocol", "well"], "--protocol well: it is initial or pdebench"),
    ("members", ["--members", "1"], "needs at least 2"),
])
def test_bad_input_is_one_sentence(base, tmp_path, monkeypatch, how, flags, words):
    run = copied(base, tmp_path, "diffusion")
    monkeypatch.chdir(tmp_path)
    if how == "no operator":
        shutil.rmtree(run / "operator")
    elif how == "stopped":
        (run / "operator" / "exit.json").write_text('{"status": "stopped", "step": 3}')
    elif how == "short":
        monkeypatch.setattr("ups.eval.data.GIVEN", 13)
    elif how == "no codec":
        shutil.rmtree(run / "codec" / "burgers1d")
    elif how == "no config":
        (run / "operator" / "config.json").unlink()
    elif how == "no fine":
        config, tensors = load_model(run / "operator" / "model")
        export_model(run / "operator" / "model", tensors,
                     {key: value for key, value in config.items() if key != "model"})
    elif how in ("other codec", "other operator"):
        part = "codec/burgers1d" if how == "other codec" else "operator"
        other_weights(run / part / "model")
    with pytest.raises(UsageError, match=words) as caught:
        evaluate.main(["--run", str(run), *(flag.format(run=run) for flag in flags)])
    assert "\n" not in str(caught.value)
    assert not (run / "evaluation").exists() and not (run / "evaluation_pdebench").exists()
    assert not (run / "nothing").exists()


def test_a_steady_prior_alone_is_taken_as_it_reported_itself(tmp_path):
    stage = tmp_path / "run" / "steady"
    stage.mkdir(parents=True)
    (stage / "exit.json").write_text('{"status": "done", "step": 3}')
    one = {"members": 2, "scores": {"nrmse": {"all": 0.125, "interval": [0.1, 0.2]}}}
    (stage / "test.json").write_text(json.dumps({"definitions": {}, "split": "test", "tasks": {
        "darcy2d": {"trajectories": "<script>", "forecasts": {"members": one}}}}))
    evaluate.main(["--run", str(tmp_path / "run")])
    darcy = results(tmp_path / "run")["steady"]["tasks"]["darcy2d"]
    assert darcy["forecasts"]["members"] == one
    page = (tmp_path / "run" / "evaluation" / "report.html").read_text()
    assert "0.125" in page and "0.1 to 0.2" in page and "train_steady.py" in page
    assert "<script>" not in page  # all that a stranger's run says is text

    (tmp_path / "secret").write_text("mine")
    (stage / "a.png").symlink_to(tmp_path / "secret")  # which the page would show
    with pytest.raises(UsageError, match="a.png is a link to .*/secret, outside of "):
        evaluate.main(["--run", str(tmp_path / "run")])
