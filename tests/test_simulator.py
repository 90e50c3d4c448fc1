"""A trained run as a function of fields: the same numbers as in evaluation, and good sentences."""

import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from launching import ROOT
from simulating import add_corrector, two_tasks

from ups import Simulator
from ups.config import UsageError
from ups.eval.ensemble import corrected, member_noise
from ups.eval.rollout import predict
from ups.latents import open_tasks
from ups.stages import load_corrector


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return two_tasks(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def sim(run):
    return Simulator.load(run, "cpu")


@pytest.fixture(scope="module")
def start():
    """Initial fields of burgers1d."""
    return np.random.default_rng(0).standard_normal((3, 1, 32)).astype("float32")


def test_a_rollout_is_what_evaluation_predicts(sim):
    accelerator = Accelerator(cpu=True)
    for index, task in enumerate(open_tasks(accelerator, sim.operator.settings)):
        chosen = task.fields.split("test")
        shown = predict(accelerator, sim.operator.model, task, index, chosen)
        params = dict(zip(task.fields.facts.params, task.fields.params(chosen).T, strict=True))
        got = sim.rollout(shown["truth"][:, 0], task.facts.frames - 1, params, task=task.name)
        assert torch.equal(got, shown["fields"][:, 1:])


def test_it_needs_no_data_and_decodes_only_what_is_asked_for(run, start, monkeypatch):
    def closed(*args, **options):
        raise AssertionError("a data file was opened")

    monkeypatch.setattr(h5py, "File", closed)
    sim = Simulator.load(run, "cpu")
    count, codec = [], sim.tasks["burgers1d"].codec
    decode = codec.decode
    monkeypatch.setattr(codec, "decode", lambda z: count.append(len(z)) or decode(z))
    all_frames = sim.rollout(start, 6, {"nu": 0.01}, task="burgers1d")
    assert isinstance(all_frames, np.ndarray) and all_frames.shape == (3, 6, 1, 32)
    assert count == [3] * 6
    some = sim.rollout(torch.from_numpy(start), 6, {"nu": 0.01}, task="burgers1d", frames=[2, 5])
    assert count == [3] * 8
    assert torch.equal(some, torch.from_numpy(all_frames[:, [1, 4]]))
    assert "burgers1d: channels u; x in [0, 1], 32 points; periodic; dt 0.25; nu 0.01, 0.1" in str(
        sim)


def test_parameters_and_time_step_reach_the_operator(sim, start):
    one = sim.rollout(start, 2, {"nu": 0.1}, task="burgers1d")
    rows = sim.rollout(start, 2, {"nu": np.array([0.1, 0.01, 0.1])}, task="burgers1d")
    assert np.array_equal(rows[[0, 2]], one[[0, 2]]) and not np.allclose(rows[1], one[1], atol=1e-7)
    with pytest.warns(UserWarning, match="nu was 0.01 to 0.1 in training") as caught:
        sim.rollout(start, 1, {"nu": 0.5}, task="burgers1d")
    assert [warning.filename for warning in caught] == [__file__]  # the caller's line
    step = sim.rollout(start, 2, {"nu": 0.1}, task="burgers1d", dt=0.1)
    assert not np.allclose(step, one, atol=1e-7)
    u = start[:, :, :16]  # advection1d had one beta, which need not be given
    assert np.array_equal(sim.rollout(u, 2, task="advection1d"),
                          sim.rollout(u, 2, {"beta": 0.1}, task="advection1d"))


def test_members_are_drawn_by_the_student_or_else_by_the_corrector(run, start, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    u, leads = torch.from_numpy(start), [1, 3]
    ask = dict(task="burgers1d", members=4, seed=5, frames=leads)
    with pytest.raises(UsageError, match="train_diffusion.py"):
        Simulator.load(tmp_path / "run", "cpu").rollout(u, 3, {"nu": 0.1}, **ask)
    for stage in ("diffusion", "consistency"):
        add_corrector(tmp_path / "run", stage)
        sim = Simulator.load(tmp_path / "run", "cpu")
        got = sim.rollout(u, 3, {"nu": 0.1}, **ask)
        assert got.shape == (3, 4, 2, 1, 32)
        task, model = sim.tasks["burgers1d"], sim.operator.model
        z0 = task.encode(u)
        corrector = load_corrector(tmp_path / "run", stage, sim.operator).model
        noise = member_noise(5, range(3), 4, 2, *z0.shape[1:])
        members = corrected(model, corrector, z0, 3, torch.full((3,), 0.25),
                            task.condition(torch.full((3, 1), 0.1)), 0, noise, 2, 1, leads)
        for i, (_, z) in enumerate(members):
            u_hat = task.decode(z)
            assert torch.equal(got[:, :, i], u_hat)
        moved = got.mean(-1) - u.mean(-1)[:, None, None]  # a patch codec's members keep it
        assert moved.abs().max() < 1e-6
        last = corrector.leads(0)
        with pytest.warns(UserWarning, match=f"learned for up to {last} steps") as caught:
            sim.rollout(u, last + 1, {"nu": 0.1}, **ask | {"frames": None})
        assert {warning.filename for warning in caught} == {__file__}  # the caller's line


@pytest.mark.parametrize("change, words", [
    (dict(task=None), "choose one of burgers1d, advection1d"),
    (dict(u0=np.zeros((3, 32))), r"shape \(3, 32\); burgers1d here takes \(batch, 1, 32\)"),
    (dict(u0=np.zeros((0, 1, 32))), "shape"),
    (dict(u0=np.full((3, 1, 32), np.nan)), "NaN"),
    (dict(params={}), "params lacks nu; the data had 0.01 to 0.1"),
    (dict(params={"nu": 1, "eta": 1}), "no parameter eta; it has nu"),
    (dict(params={"nu": [0.1, 0.1]}), "or 3 of them"),
    (dict(steps=0), "0 steps"),
    (dict(steps=2.5), "steps=2.5: it is a whole number"),
    (dict(members="3"), "members='3'"),
    (dict(seed=None), "seed=None"),
    (dict(frames=[3, 1]), "in order"),
    (dict(frames=[9]), "1 .. steps"),
    (dict(dt=0.0), "above 0"),
    (dict(members=0), "above 0"),
])
def test_wrong_use_is_one_sentence(sim, start, change, words):
    call = dict(u0=start, steps=4, params={"nu": 0.1}, task="burgers1d") | change
    with pytest.raises(UsageError, match=words):
        sim.rollout(**call)


def test_what_does_not_belong_together_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"):
        Simulator.load(tmp_path / "nothing")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "codec" / "advection1d")
    with pytest.raises(UsageError, match="config.json is missing.; put it back"):
        Simulator.load(copy)
    shutil.copytree(run / "codec" / "burgers1d", copy / "codec" / "advection1d")
    with pytest.raises(UsageError, match="is not the codec that"):
        Simulator.load(copy)
    shutil.rmtree(copy / "operator")
    with pytest.raises(UsageError, match="train it first"):
        Simulator.load(copy)


def test_the_package_alone_does_not_import_torch():
    code = "import sys, ups; assert 'torch' not in sys.modules; ups.nothing"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "has no attribute 'nothing'" in done.stderr
