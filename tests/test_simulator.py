"""A trained run as a function of fields, and exported: the same numbers, and good sentences."""

import functools
import json
import shutil
import subprocess
import sys
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from launching import ROOT
from simulating import OPERATOR, add_generator, driven, two_tasks

import evaluate
import train_operator
from ups import Simulator
from ups.config import UsageError
from ups.data import write_fields
from ups.eval.ensemble import member_noise, roll_out_members
from ups.export import main
from ups.latents import open_tasks
from ups.relative_error import mean_relative_error
from ups.stages import preferred
from ups.train.checkpoint import export_model, load_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return two_tasks(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    return driven(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def generators(run, tmp_path_factory):
    """The run with all that draws members."""
    folder = shutil.copytree(run, tmp_path_factory.mktemp("generators") / "run")
    for stage in ("ensemble", "diffusion", "consistency"):
        add_generator(folder, stage)
    return folder


@pytest.fixture(scope="module")
def sim(run):
    return Simulator.load(run, "cpu")


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


@pytest.fixture(scope="module")
def start():
    """Initial fields of burgers1d."""
    return np.random.default_rng(0).uniform(-1, 1, (3, 1, 32)).astype("float32")


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}


def test_a_rollout_has_the_errors_that_the_test_reported(run, pushed):
    for folder in (run, pushed):
        sim = Simulator.load(folder, "cpu")
        told = json.loads((folder / "operator" / "test.json").read_text())["tasks"]
        for task in open_tasks(Accelerator(cpu=True), sim.operator.settings):
            chosen = task.fields.split("test")
            u, params = task.fields.read(chosen), task.fields.params(chosen).T
            params = dict(zip(task.facts.params, params, strict=True))
            inputs = task.fields.inputs(chosen)
            inputs = None if inputs is None else {"force": inputs[:, :, 0]}
            got = sim.rollout(u[:, 0], u.shape[1] - 1, params, inputs, task=task.name)
            error = mean_relative_error(got.flatten(0, 1), u[:, 1:].flatten(0, 1)).mean().item()
            told_error = told[task.name]["forecasts"]["operator"]["scores"]["nrmse"]["all"]
            assert error == pytest.approx(told_error, rel=1e-5)


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
    some = sim.rollout(torch.from_numpy(start), times=[0.5, 1.25], params={"nu": 0.01},
                       task="burgers1d")
    assert count == [3] * 8
    assert torch.equal(some, torch.from_numpy(all_frames[:, [1, 4]]))
    assert "burgers1d: channels u; x in [0, 1], 32 points, periodic; dt 0.25; nu 0.01, 0.1" in str(
        sim)


def test_frames_of_any_plan_are_those_of_its_steps_one_by_one(sim, start):
    task, model, u = sim.tasks["burgers1d"], sim.operator.model, torch.from_numpy(start)
    ask = dict(params={"nu": 0.1}, task="burgers1d")
    cond = task.condition(torch.full((3, 1), 0.1))
    for stride, ways in ((1, {5: (1, 1, 1, 1, 1), 7: (1,) * 7}), (2, {5: (2, 2, 1), 6: (2, 2, 2)}),
                         (4, {3: (2, 1), 4: (4,), 7: (4, 2, 1), 8: (4, 4)})):
        whole = sim.rollout(u, 8, stride=stride, **ask)
        for lead, steps in ways.items():
            z = task.encode(u)
            for n in steps:
                z = model(z, torch.full((3,), 0.25 * n), cond)
            expected = task.decode(z)
            assert torch.allclose(whole[:, lead - 1], expected, atol=1e-5)
            alone = sim.rollout(u, times=[0.25 * lead], stride=stride, **ask)
            assert torch.allclose(alone[:, 0], expected, atol=1e-5)
    assert (whole - sim.rollout(u, 8, stride=1, **ask)).abs().max() > 1e-4
    coarse = sim.rollout(u, 2, dt=1.0, **ask)  # frames of that distance, a step each
    assert torch.allclose(coarse, whole[:, 3::4], atol=1e-5)


def test_the_cheapest_plan_that_is_accurate_enough_is_taken(copy, start):
    """As validation measured them; frame 8 costs eight steps of 1, four of 2 or two of 4."""
    path = copy / "operator" / "choices.json"
    told = json.loads(path.read_text())["burgers1d"]["plans"]
    assert list(told) == ["1", "2", "4"] and {len(errors) for errors in told.values()} == {8}
    errors = {1: [0.01] * 8, 2: [0.02] * 8, 4: [0.03] * 7 + [0.005]}
    path.write_text(json.dumps({"burgers1d": {"plans": errors}}))
    sim, ask = Simulator.load(copy, "cpu"), dict(params={"nu": 0.1}, task="burgers1d")
    for accuracy, time, stride in ((None, 1.0, 1), (None, 2.0, 4), (0.01, 1.0, 1), (0.02, 1.0, 2),
                                   (0.05, 1.0, 4), (0.05, 0.25, 1), (0.05, 5.0, 4)):
        got = sim.rollout(start, times=time, accuracy=accuracy, **ask)
        assert np.array_equal(got, sim.rollout(start, times=[time], stride=stride, **ask))
    path.unlink()
    with pytest.raises(UsageError, match="has no operator/choices.json"):
        Simulator.load(copy, "cpu").rollout(start, 2, accuracy=0.1, **ask)


def test_a_lower_precision_rounds_the_update_and_never_the_state(run, sim, start):
    ask = dict(steps=8, params={"nu": 0.1}, task="burgers1d")
    exact = sim.rollout(start, **ask)
    assert sim.precisions == {"burgers1d": "float32", "advection1d": "float32"}
    rounded = Simulator.load(run, "cpu", precision="bfloat16")
    got = rounded.rollout(start, **ask)
    assert "precision of the update: bfloat16" in str(rounded)
    change = np.abs(exact - exact[:, :1]).max()
    assert 0 < np.abs(got - exact).max() < 0.03 * change  # of eight bits, in eight steps
    moved = got.mean(-1) - start.mean(-1)[:, None]  # a state of eight bits would lose its mean
    assert np.abs(moved).max() < 1e-6
    u0 = torch.from_numpy(start).requires_grad_()  # gradients are exact
    assert np.array_equal(rounded.rollout(u0, grad=True, **ask).detach(), exact)
    for wrong, words in ((dict(precision="fp16"), "precision='fp16': it is one of bfloat16, tf32"),
                         (dict(device="gpu"), "device='gpu': there is none"),
                         (dict(model="a.py:A"), "model='a.py:A': it is a class"),
                         (dict(model=torch.nn.Linear), "not Linear; leave --model, or model=")):
        with pytest.raises(UsageError, match=words):
            Simulator.load(run, **wrong)


def test_parameters_reach_the_operator_and_what_no_training_saw_warns(sim, start, recwarn):
    one = sim.rollout(start, 2, {"nu": 0.1}, task="burgers1d")
    rows = sim.rollout(start, 2, {"nu": np.array([0.1, 0.01, 0.1])}, task="burgers1d")
    assert np.array_equal(rows[[0, 2]], one[[0, 2]]) and not np.allclose(rows[1], one[1], atol=1e-7)
    u = start[:, :, :16]  # advection1d had one beta, which need not be given
    assert np.array_equal(sim.rollout(u, 2, task="advection1d"),
                          sim.rollout(u, 2, {"beta": 0.1}, task="advection1d"))
    low, high = sim.tasks["burgers1d"].codec.seen.flatten().tolist()
    assert not recwarn.list and -5 < low < 0 < high < 5
    sim.rollout(start, 1, {"nu": 0.5}, task="burgers1d")
    sim.rollout(10 * high * start, 1, {"nu": 0.1}, task="burgers1d")
    told = [(str(one.message), one.filename) for one in recwarn]
    rest = "; training saw {:.3g} to {:.3g}, and what is outside is a guess."
    assert told[0] == ("nu is 0.5 to 0.5" + rest.format(0.01, 0.1), __file__)
    assert told[1][0].startswith("u of u0 is -") and told[1][0].endswith(rest.format(low, high))
    assert told[1][1] == __file__


@patch("ups.eval.report.page", lambda *args: "")
def test_a_history_tells_what_one_frame_does_not(tmp_path):
    """Waves that run to the left or to the right: one frame does not say which."""
    rng, x = np.random.default_rng(0), 2 * np.pi * np.arange(16) / 16
    sign, phase = rng.choice([-1, 1], (40, 1, 1)), rng.uniform(0, 6, (40, 1, 1))
    u = np.cos(x + phase + sign * 0.4 * np.arange(8)[:, None])
    data = write_fields(tmp_path / "waves.h5", u, dt=0.1, channels="u", axes="x",
                        boundary="periodic")
    run = ["--run", str(tmp_path / "run"), "--data", str(data), "--cache", str(tmp_path / "cache")]
    train_operator.main([*run, *OPERATOR, "--history", "2", "--steps", "100", "--batch_size", "16"])
    operator = tmp_path / "run" / "operator"
    told = json.loads((operator / "test.json").read_text())["tasks"]["waves"]["forecasts"]
    told, persistence = (told[name]["scores"]["nrmse"] for name in ("operator", "persistence"))
    assert told["by_lead"][0] < 0.25 * persistence["by_lead"][0]
    sim = Simulator.load(tmp_path / "run", "cpu")
    fields, = (task.fields for task in open_tasks(Accelerator(cpu=True), sim.operator.settings))
    u = fields.read(fields.split("test"))
    got = sim.rollout(u[:, :2], 6)
    error = mean_relative_error(got.flatten(0, 1), u[:, 2:].flatten(0, 1)).mean().item()
    assert error == pytest.approx(told["all"], rel=1e-5)
    again = sim.rollout(torch.stack([u[:, 1], got[:, 0]], 1), 5)
    assert torch.allclose(again, got[:, 1:], atol=1e-5)
    evaluate.main(["--run", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run/evaluation/metrics.json").read_text())["tasks"]["waves"]
    assert found["steps"] == 6 and "from 2 true frames over 6 steps" in found["protocol"]
    score = found["forecasts"]["operator"]["scores"]["nrmse"]
    assert score["all"] == pytest.approx(error, rel=1e-4) and len(score["by_lead"]) == 6
    assert sim.rollout(u[:, :2], 6, members=2).shape == (4, 2, 6, 1, 16)
    with pytest.raises(UsageError, match=r"takes \(batch, 2, 1, 16\): frames, channels u"):
        sim.rollout(u[:, 0], 2)


def test_inputs_are_those_of_the_time_of_each_step(pushed):
    sim = Simulator.load(pushed, "cpu")
    u0, k, rng = np.zeros((2, 1, 16)), {"k": [-1.0, 2.0]}, np.random.default_rng(0)
    v = rng.standard_normal((2, 4, 16)).astype("float32")
    by_hand = u0
    whole = sim.rollout(u0, 4, k, {"force": v})
    for step in range(4):
        by_hand = sim.rollout(by_hand, 1, k, {"force": v[:, step]})[:, 0]
        assert np.allclose(by_hand, whole[:, step], atol=1e-4)  # decoded between the steps
    late = v.copy()
    late[:, 3] += 1
    changed = np.abs(sim.rollout(u0, 4, k, {"force": late}) - whole).max((0, 2, 3))
    assert (changed[:3] == 0).all() and changed[3] > 0
    constant = sim.rollout(u0, 3, k, {"force": v[:1, 0]})  # one for all rows and times
    assert np.array_equal(constant, sim.rollout(u0, 3, k, {"force": v[:1, :1] + 0 * v}))
    assert "inputs force" in str(sim)
    for inputs, words in [(None, "inputs are none; driven takes a dictionary of force"),
                          ({"wind": v}, "inputs are wind; driven takes a dictionary of force"),
                          ({"force": v[:, :2]}, r"the shape \(2, 2, 16\); .*4 or more, 16"),
                          ({"force": v[:, 0, :8]}, "the shape"), ({"force": v[[0, 0, 0]]}, "shape"),
                          ({"force": v * np.nan}, "NaN")]:
        with pytest.raises(UsageError, match=words):
            sim.rollout(u0, 4, k, inputs)


@pytest.mark.parametrize("stage", [None, "ensemble", "diffusion", "consistency"])
def test_members_are_drawn_by_what_val_prefers_and_are_trajectories(run, generators, tmp_path,
                                                                    start, stage):
    """A run without a generator perturbs its inputs by the size that it chose."""
    copy = shutil.copytree(generators if stage else run, tmp_path / "run")
    path = copy / (stage or "operator") / "choices.json"
    choices = json.loads(path.read_text())
    choices["burgers1d"] |= {"crps_ratio": 1e-3, "perturbation": 0.02}
    path.write_text(json.dumps(choices))
    assert preferred(copy, "burgers1d") == (stage or "operator")
    sim, u = Simulator.load(copy, "cpu"), torch.from_numpy(start)
    got = sim.rollout(u, times=[0.25, 0.75], task="burgers1d", params={"nu": 0.1}, members=4,
                      seed=5)
    assert got.shape == (3, 4, 2, 1, 32)
    task, generator = sim.tasks["burgers1d"], sim.generator("burgers1d")
    assert generator.perturbation[0] == 0.02
    noise = functools.partial(member_noise, 5, range(3), 4, "cpu")
    dt, cond = torch.full((3,), 0.25), task.condition(torch.full((3, 1), 0.1))
    states = list(roll_out_members(generator, task.encode(u), 3, dt, cond, 0, noise,
                                   task.noise_scale))
    for i, k in enumerate((0, 2)):
        assert torch.equal(got[:, :, i], task.decode(states[k]))
    on = generator.step(states[1][:, 3], dt, cond, 0, noise(3, generator.numbers(0))[:, 3])
    torch.testing.assert_close(on, states[2][:, 3])
    assert got.std(1).mean() > 1e-4
    moved = got.mean(-1) - u.mean(-1)[:, None, None]  # a patch codec's members keep it
    assert moved.abs().max() < 2e-6


@pytest.mark.parametrize("kind", ["file", "map", "array"])
def test_many_rows_go_through_in_batches(sim, tmp_path, monkeypatch, kind):
    """From a map on disk, of another byte order, into a file, or a map."""
    u0 = np.lib.format.open_memmap(tmp_path / "u0.npy", "w+", ">f4", (7, 1, 32))
    u0[:] = np.random.default_rng(1).uniform(-1, 1, u0.shape)
    ask = dict(steps=3, params={"nu": np.geomspace(0.01, 0.1, 7)}, task="burgers1d")
    whole = sim.rollout(np.array(u0, "f4"), **ask)
    monkeypatch.setattr("ups.simulator.TOKENS", {"cpu": 3 * 8})  # three rows of eight
    out = {"file": tmp_path / "some" / "u.h5", "array": None, "map": np.lib.format.open_memmap(
        tmp_path / "u.npy", "w+", "float32", whole.shape)}[kind]
    got = sim.rollout(np.load(tmp_path / "u0.npy", mmap_mode="r"), **ask, out=out)
    if kind == "file":
        with h5py.File(got) as file:
            got = file["u"][:]
    assert got is out or kind != "map"
    np.testing.assert_allclose(got, whole, rtol=0, atol=1e-5)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_compiled_model_sees_batches_of_one_size(sim, monkeypatch):
    """Each other size would be compiled anew."""
    predict, sizes = sim._predict, []
    u0, ask = torch.rand(7, 1, 32), dict(steps=2, params={"nu": 0.1}, task="burgers1d")
    whole = sim.rollout(u0, **ask)
    monkeypatch.setattr("ups.simulator.TOKENS", {"cpu": 3 * 8})
    monkeypatch.setattr(sim, "compiled", True)
    monkeypatch.setattr(sim, "_predict",
                        lambda *key: sizes.append(len(key[4])) or predict(*key))
    torch.testing.assert_close(sim.rollout(u0, **ask), whole, rtol=0, atol=1e-5)
    assert sizes == [3, 3, 3]


def test_a_batch_that_does_not_fit_is_halved(sim, start, monkeypatch):
    predict, sizes = sim._predict, []

    def small(index, leads, longest, precision, u, *rest):
        sizes.append(len(u))
        if len(u) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return predict(index, leads, longest, precision, u, *rest)

    monkeypatch.setattr(sim, "_predict", small)
    got = sim.rollout(start, 2, {"nu": 0.1}, task="burgers1d")
    assert sizes == [3, 1, 1, 1] and got.shape == (3, 2, 1, 32)


def test_gradients_reach_the_initial_state_parameters_and_inputs(pushed, sim, start):
    """Against differences of float64 roll-outs, along random directions."""
    sim, given = Simulator.load(pushed, "cpu"), np.random.default_rng(2)
    for part in (sim.operator.model, *(task.codec for task in sim.tasks.values())):
        part.double()
    sim._here = lambda rows: [x if x is None else x.double() for x in rows]
    values = [torch.tensor(given.uniform(-1, 1, shape)) for shape in ((2, 1, 16), (2,), (2, 3, 16))]

    def size(u0, k, force):
        u = sim.rollout(u0, 3, {"k": k}, {"force": force}, grad=True)
        return u.square().sum()

    leaves = [value.clone().requires_grad_() for value in values]
    grads = torch.autograd.grad(size(*leaves), leaves)
    for i, grad in enumerate(grads):
        step = torch.tensor(given.standard_normal(values[i].shape))
        ends = [size(*values[:i], values[i] + s * 1e-3 * step, *values[i + 1:]) for s in (-1, 1)]
        slope = ((ends[1] - ends[0]) / 2e-3).item()
        assert (grad * step).sum().item() == pytest.approx(slope, rel=2e-3) and abs(slope) > 1e-7


@pytest.mark.parametrize("change, words", [
    (dict(task=None), "choose one of burgers1d, advection1d"),
    (dict(u0=np.zeros((3, 32))), r"shape \(3, 32\); burgers1d here takes \(batch, 1, 32\)"),
    (dict(u0=np.full((3, 1, 32), np.nan)), "NaN"),
    (dict(u0=np.ma.masked_less(np.eye(3, 32)[:, None], 1)), "u of u0 holds NaN"),
    (dict(u0="u0.npy"), "u0 holds no real numbers"),
    (dict(u0=torch.zeros(3, 1, 32) + 0j), "u0 holds no real numbers"),
    (dict(params={}), "params are none; burgers1d takes a dictionary of nu"),
    (dict(params=np.ones(3)), "params are of <class .*ndarray'>; burgers1d takes a dictionary"),
    (dict(params={"nu": 1, "eta": 1}), "params are nu, eta; burgers1d takes a dictionary of nu"),
    (dict(params={"nu": 0}), "must be positive"),
    (dict(params={"nu": "low"}), r"params\['nu'\] holds no real numbers"),
    (dict(params={"nu": [0.1, 0.1]}), "or 3 of them"),
    (dict(inputs={"wind": np.zeros((3, 32))}), "inputs are wind; burgers1d takes none"),
    (dict(steps=0), "steps=0: it is a whole number, 1 or more"),
    (dict(steps=None), "give the number of steps, or times="),
    (dict(times=[1.0]), "give the number of steps, or times="),
    (dict(steps=None, times=[0.5, 0.8]), "times holds 0.8, .* of 0.25 from u0 on; .* is 0.75"),
    (dict(steps=None, times=[0.0]), "times holds 0, .* the nearest is 0.25"),
    (dict(steps=None, times=[0.5, 0.25]), "ascending order"),
    (dict(steps=None, times=["late"]), "times holds no real numbers"),
    (dict(steps=None, times=np.nan), "times holds nan"),
    (dict(steps=None, times=[[0.5, 0.25]]), "ascending order"),
    (dict(members=2, seed=None), "seed=None: it is a whole number, 0 or more"),
    (dict(members=2, seed=0.5), "seed=0.5: it is a whole number, 0 or more"),
    (dict(members=2, stride=1), "members go from frame to frame: leave dt, accuracy and stride"),
    (dict(grad=True, members=2), "grad=True keeps every step in memory"),
    (dict(out=np.zeros((3, 4, 1, 16))), r"shape \(3, 4, 1, 16\); this gives \(3, 4, 1, 32\)"),
    (dict(out=np.zeros((3, 4, 1, 32), int)), "out holds int64; give it float32"),
    (dict(dt=0.05), "dt=0.05: this run has learned steps of 0.25, 0.5, 1; .* multiples of 0.25"),
    (dict(dt="long"), "dt='long': it is a number"),
    (dict(dt=0.5, stride=1), "give one of dt=, accuracy= and stride="),
    (dict(stride=3), "stride=3: this run has learned steps of 1, 2, 4 frames"),
    (dict(stride=2, accuracy=0.1), "give one of dt=, accuracy= and stride="),
    (dict(accuracy=1e-9), "accuracy=1e-09: no way to these frames is so accurate; the best has"),
])
def test_wrong_use_is_one_sentence(sim, start, change, words):
    call = dict(u0=start, steps=4, params={"nu": 0.1}, task="burgers1d") | change
    with pytest.raises(UsageError, match=words):
        sim.rollout(**call)


@pytest.mark.parametrize("ask, words", [
    (dict(steps=10**6), r"a roll-out of 1000000 steps needs 0.4 GiB .*; ask for fewer steps at a"),
    (dict(times=[1e30]), r"a roll-out of \d+ steps needs"),
    (dict(steps=10**5), r"shape \(3, 100000, 1, 32\) needs .*, or write them into a file: out="),
    (dict(steps=10**5, members=3, out="u.h5"), r"\(3, 3, 100000, 1, 32\) needs .* at a time\.$")])
def test_what_does_not_fit_into_memory_is_refused(sim, start, monkeypatch, ask, words):
    monkeypatch.setattr("ups.memory.free_memory", lambda: 5e7)
    with pytest.raises(UsageError, match=words):
        sim.rollout(start, **ask, params={"nu": 0.05}, task="burgers1d")


def test_the_package_alone_does_not_import_torch():
    code = "import sys, ups; assert 'torch' not in sys.modules; ups.nothing"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "has no attribute 'nothing'" in done.stderr


def test_an_export_is_complete_and_gives_the_same_rollouts_bit_for_bit(
        generators, start, tmp_path, capsys):
    run = shutil.copytree(generators, tmp_path / "run")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "report.html").write_text("has paths of this machine")
    (run / "consistency" / "exit.json").unlink()  # begun and not finished: left out
    out = tmp_path / "some" / "model"
    main([str(run), str(out), "--license", "mit"])
    assert "hf upload USER/model" in capsys.readouterr().out
    for kind in ("is_file", "is_dir"):  # what all may read, and go into
        assert len({path.stat().st_mode for path in (run / "operator", run / "README.md",
                    *out.rglob("*")) if getattr(path, kind)()}) == 1
    sims = [Simulator.load(folder, "cpu")
            for folder in (run, shutil.move(out, tmp_path / "elsewhere"))]
    for members in (None, 3):
        one, other = (sim.rollout(start, 3, {"nu": 0.02}, task="burgers1d", members=members)
                      for sim in sims)
        assert np.array_equal(one, other)
    there = files(tmp_path / "elsewhere")
    assert {"README.md", "config.json", "operator/exit.json", "operator/test.json",
            "codec/advection1d/model/model.safetensors"} <= set(there)
    assert not [name for name in there if "checkpoints" in name or "consistency" in name]
    assert not [name for name, text in there.items() if str(tmp_path).encode() in text]

    # the model card: front matter of the hub, and the measured numbers
    text = there["README.md"].decode()
    front = yaml.safe_load(text.split("---")[1])
    assert (front["library_name"], front["license"]) == ("ups", "mit")
    assert front["tags"][-2:] == ["burgers1d", "advection1d"]
    for task, result in json.loads(there["operator/test.json"])["tasks"].items():
        errors = [f"{result['forecasts'][row]['scores']['nrmse']['all']:.3g}"
                  for row in ("operator", "persistence")]
        assert f"| {task} | {' | '.join(errors)} |\n" in text
    assert 'sim.rollout(u0, 40, params={..}, task="burgers1d")  # u0 (batch, 1, 32)' in text


def test_an_earlier_export_is_replaced_and_nothing_else(copy, tmp_path):
    out = tmp_path / "model"
    out.mkdir()  # empty: fine
    main([str(copy), str(out)])
    (out / "README.md").write_text("old")
    main([str(copy), str(out)])
    assert "library_name: ups" in (out / "README.md").read_text()
    kept = files(copy)
    for foreign in (copy, tmp_path, copy / "operator" / "exit.json"):
        with pytest.raises(UsageError, match="was not written by ups.simulator"):
            main([str(copy), str(foreign)])
    with pytest.raises(UsageError, match="cannot be written .Not a directory.; give another fold"):
        main([str(copy), str(copy / "operator" / "exit.json" / "model")])
    assert files(copy) == kept

    # a damaged run writes nothing, and a damaged copy is not loaded
    before, weights = files(out), copy / "operator" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    for use in (lambda: Simulator.load(copy), lambda: main([str(copy), str(out)])):
        with pytest.raises(UsageError, match="do not belong together"):
            use()
    assert files(out) == before and not list(tmp_path.glob("*.partial"))


def test_an_export_of_a_stranger_is_not_trusted(copy, tmp_path):
    """No code, no pickle, no other place than its own, to read or to write."""
    main([str(copy), str(tmp_path / "model")])

    def forged(change, **tensors):
        """The export again, with another configuration and a fingerprint that fits."""
        folder = tmp_path / "forged" / "operator" / "model"
        shutil.rmtree(tmp_path / "forged", ignore_errors=True)
        shutil.copytree(tmp_path / "model", tmp_path / "forged")
        config, known = load_model(folder)
        del config["fingerprint"]
        change(config)
        export_model(folder, known | tensors, config)
        return tmp_path / "forged"

    assert Simulator.load(forged(lambda config: None), "cpu").tasks  # the forger knows his trade
    for bad in ("../../model/codec/burgers1d", str(copy / "codec" / "burgers1d"), "..", "a\\b"):
        with pytest.raises(UsageError, match="a data set cannot be called"):
            Simulator.load(forged(lambda config, bad=bad: config["fields"][0].update(name=bad)))
    with pytest.raises(UsageError, match="class os.system, not LatentOperator; say where its code"):
        Simulator.load(forged(lambda config: config.update({"class": "os.system"})))
    with pytest.raises(UsageError, match="another version of the model"):
        Simulator.load(forged(lambda config: config["model"].update(hook="os.system")))

    (tmp_path / "secret").write_text("{}")
    folder = forged(lambda config: None)
    (folder / "operator" / "test.json").unlink()
    (folder / "operator" / "test.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="is a link that leaves the run"):
        main([str(folder), str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()
    weights = folder / "operator" / "model" / "model.safetensors"
    torch.save({"a": torch.ones(1)}, weights)  # a pickle, under that name
    with pytest.raises(UsageError, match="not readable"):
        Simulator.load(folder)
