"""A user's morning: six equations in six formats, from `inspect` to an export without the data."""

import dataclasses
import json
import shutil
import subprocess
import sys
from unittest.mock import patch

import equations
import numpy as np
import pytest
import torch
from launching import ROOT, environment

import evaluate
import train_operator
from ups import Simulator
from ups.data.__main__ import main as data_command
from ups.data.find import open_data
from ups.export import main as simulator_command
from ups.train.run import RunConfig

TINY = ["--model.dim", "32", "--model.depth", "2", "--model.modes", "6", "--batch_size", "16",
        "--warmup", "10", "--log_every", "50"]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str             # of the data set
    make: callable        # writes it
    flags: str            # of the training
    beats: float          # least ratio of the error of persistence to that of the operator ..
    why: str              # .. and what the equation allows
    channels: tuple
    boundary: tuple
    uses: str             # what `inspect` says that training makes of the facts
    params: tuple = ()
    inputs: tuple = ()


CASES = [
    Case("kdv", equations.kdv, "--steps 150", 5, "smooth and deterministic, but nonlinear",
         ("u",), ("periodic",), "shifts along x"),
    Case("allen_cahn", equations.allen_cahn, "--steps 250", 5, "contracting: errors die out",
         ("phi",), ("periodic",), "mirror of x; phi -> -phi", ("nu",)),
    Case("advected", equations.advection_diffusion, "--steps 250", 3, "another flow in each sample",
         ("c",), ("periodic", "closed"), "shifts along x; mean of c kept", (), ("vx", "vy")),
    Case("gray_scott", equations.gray_scott, "--steps 150", 3, "patterns grow from what is there",
         ("u", "v"), ("periodic", "periodic"), "shifts along x and y", ("F", "k")),
    Case("diffusion3d", equations.diffusion3d, "--steps 100 --batch_size 4", 5,
         "linear: one number for each wave", ("u",), ("periodic",) * 3, "sums of solutions"),
    Case("convection", equations.convection, "--steps 100", 10, "linear waves without decay",
         ("buoyancy", "velocity_x", "velocity_y"), ("periodic", "closed"), "shifts along x",
         ("alpha",)),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("morning")


def nrmse(p, u):
    """Mean over trajectories, steps and channels of |p - u| / |u|, norms over space."""
    p, u = (np.reshape(x, (*x.shape[:3], -1)) for x in (p, u))
    return (np.linalg.norm(p - u, axis=-1) / np.linalg.norm(u, axis=-1)).mean()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@patch("ups.eval.finish.picture", lambda *args: None)
def test_from_arrays_to_a_simulator(case, base, capsys, monkeypatch):
    if case.name != "convection":  # a page of pictures takes longer than the training
        monkeypatch.setattr("ups.eval.report.page", lambda *args: "")
    path, flags, u = case.make(base)
    out, run = base / "exports" / case.name, str(base / "runs" / case.name)

    # look
    assert data_command(["inspect", str(path), *flags]) == 0
    text = capsys.readouterr().out
    assert "WRONG" not in text and case.uses in text and "Train on it: accelerate" in text
    assert data_command(["validate", str(path), *flags]) == 0

    # train and evaluate
    train_operator.main(["--data", str(path), *flags, "--run", run, "--cache",
                         str(base / "cache"), *TINY, *case.flags.split()])
    evaluate.main(["--run", run])
    result = json.loads((base / "runs" / case.name / "evaluation/metrics.json").read_text())
    result, = result["tasks"].values()
    error, persistence = (result["forecasts"][name]["scores"]["nrmse"]["all"]
                          for name in ("operator", "persistence"))
    print(f"{case.name}: {persistence:.3g} / {error:.3g} = {persistence / error:.1f}")
    assert persistence / error > case.beats, case.why

    # simulate: what the evaluation measured, from the fields themselves
    sim = Simulator.load(run, "cpu")
    facts = sim.tasks[case.name].facts
    assert (facts.channels, facts.inputs, facts.params, facts.boundary) == (
        case.channels, case.inputs, case.params, case.boundary)
    fields, = open_data(RunConfig(data=(str(path),), axes=flags[-1] if flags else "", run="-"))
    test = fields.split("test")
    u, values = fields.read(test).numpy(), fields.params(test)
    given = {"params": dict(zip(facts.params, values.T, strict=True)),
             "inputs": dict(zip(facts.inputs, fields.inputs(test).unbind(2), strict=True))
             if facts.inputs else None}
    steps = u.shape[1] - 1
    p = sim.rollout(u[:, 0], steps, **given)
    assert p.shape == u[:, 1:].shape
    assert nrmse(p, u[:, 1:]) == pytest.approx(error, rel=1e-3)

    # other data of the same channels: all of them are test
    if case.name == "kdv":
        other = np.load(path)
        np.savez(base / "other.npz", u=-other["u"][:7, ::-1, ::-1], t=other["t"], x=other["x"])
        evaluate.main(["--run", run, "--data", str(base / "other.npz")])
        other = base / "runs/kdv/evaluation_other_data/metrics.json"
        other = json.loads(other.read_text())["tasks"]["kdv"]
        assert other["trajectories"] == 7 and "mean" not in other["forecasts"]
        assert other["forecasts"]["operator"]["scores"]["nrmse"]["all"] > 2 * error  # no solutions

    # inputs are no output, but matter, and so do parameters
    assert result["channels"] == list(case.channels)
    if case.inputs:
        other = sim.rollout(u[:, 0], steps, inputs={
            name: value.flip(0) for name, value in given["inputs"].items()})
        assert nrmse(other, u[:, 1:]) > 1.5 * error
    if case.params:
        other = {name: value.flip(0) for name, value in given["params"].items()}
        assert nrmse(sim.rollout(u[:, 0], steps, other, given["inputs"]), u[:, 1:]) > 1.2 * error

    # export
    simulator_command([run, str(out)])
    torch.save({"u0": torch.tensor(u[:, 0]), "steps": steps, "p": torch.tensor(p), **given},
               out / "expected.pt")


FRESH = """
import sys
from pathlib import Path
import torch
from ups import Simulator
for folder in sorted(Path(sys.argv[1]).iterdir()):
    saved = torch.load(folder / "expected.pt")
    expected = saved.pop("p")
    error = (Simulator.load(folder, "cpu").rollout(**saved) - expected).abs().max()
    print(folder.name, float(error / expected.abs().max()))
"""


def test_exports_work_in_a_fresh_process_without_the_data(base):
    shutil.move(base / "exports", base.with_name("elsewhere"))
    shutil.rmtree(base)
    out = subprocess.run([sys.executable, "-c", FRESH, base.with_name("elsewhere")], text=True,
                         capture_output=True, env=environment(), cwd=ROOT, timeout=120)
    assert out.returncode == 0, out.stderr
    errors = dict(line.split() for line in out.stdout.splitlines())
    assert errors.keys() == {case.name for case in CASES}
    assert max(map(float, errors.values())) < 1e-6
