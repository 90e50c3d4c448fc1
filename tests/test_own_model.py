"""A copy of train_operator.py with a model of the reader's own: short, and used like any other."""

import difflib
import json

import pytest
import torch
from accelerate.state import AcceleratorState
from launching import ROOT

import evaluate
import train_operator
from examples import own_model
from ups import Simulator
from ups.config import UsageError
from ups.data.make import make
from ups.export import main as export
from ups.stages import load_class

FILE = f"{ROOT}/examples/own_model.py:ConvNet"


def train(folder, *more):
    own_model.main(["--run", str(folder / "run"), "--data", str(folder / "data"), "--cache",
                    str(folder / "cache"), "--steps", "20", "--batch_size", "8", "--save_every",
                    "10", "--warmup", "2", "--lr", "1e-2", "--model.channels", "8", *more])
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    make("burgers1d", out=folder / "data", samples=40, grid=32, frames=9, t_end=0.4)
    train(folder)
    return folder


def test_a_copy_differs_in_forty_lines_at_most():
    ours, copy = ((ROOT / name).read_text().splitlines()
                  for name in ("train_operator.py", "examples/own_model.py"))
    changes = [line for line in difflib.ndiff(ours, copy) if line[0] in "+-"]
    assert 0 < len(changes) <= 40, "\n".join(changes)


def test_it_learns_and_resumes_bit_for_bit(folder):
    stage = folder / "run" / "operator"
    test = json.loads((stage / "test.json").read_text())["tasks"]["burgers1d"]["forecasts"]
    error, persistence = (test[name]["scores"]["nrmse"]["all"] for name in ("operator",
                                                                            "persistence"))
    assert error < persistence
    weights = (stage / "model" / "model.safetensors").read_bytes()
    for path in (stage / "checkpoints/step_20/state.safetensors", stage / "exit.json"):
        path.unlink()
    train(folder)
    assert (stage / "model" / "model.safetensors").read_bytes() == weights


def test_it_is_measured_rolled_out_and_exported(folder, monkeypatch):
    monkeypatch.setattr("ups.eval.report.page", lambda *args: "")
    run, stage = folder / "run", folder / "run" / "operator"
    evaluate.main(["--run", str(run), "--model", FILE])
    found = json.loads((run / "evaluation" / "metrics.json").read_text())
    row = found["tasks"]["burgers1d"]["forecasts"]["operator"]
    test = json.loads((stage / "test.json").read_text())["tasks"]["burgers1d"]["forecasts"]
    errors = [one["scores"]["nrmse"]["all"] for one in (row, test["operator"])]
    assert errors[0] == pytest.approx(errors[1], rel=1e-5)
    u0 = torch.rand(2, 1, 32)
    sim = Simulator.load(run, "cpu", own_model.ConvNet)
    nu = {"nu": 0.01} if sim.tasks["burgers1d"].facts.params else {}
    u = sim.rollout(u0, 3, nu)
    assert u.shape == (2, 3, 1, 32) and u.isfinite().all()
    export([str(run), str(folder / "exported"), "--model", FILE])
    again = Simulator.load(folder / "exported", "cpu", own_model.ConvNet)
    assert torch.equal(again.rollout(u0, 3, nu), u)


def test_its_code_is_never_loaded_because_a_folder_names_it(folder):
    run, other = str(folder / "run"), str(folder / "other")
    words = r"holds an operator of class ConvNet.*`--model FILE.py:ConvNet`"
    for use, told in (
            (lambda: Simulator.load(run, "cpu"), words),
            (lambda: evaluate.main(["--run", run]), words),
            (lambda: load_class(f"{ROOT}/README.md:ConvNet"), "there is no script .*README.md"),
            (lambda: load_class(f"{FILE}s"), "own_model.py has no class ConvNets"),
            (lambda: train_operator.main(["--init", run, "--run", other]),
             "its operator is a ConvNet, and this one a LatentOperator; begin from")):
        with pytest.raises(UsageError, match=told):
            use()
