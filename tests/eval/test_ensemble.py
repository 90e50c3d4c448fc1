"""Members are trajectories: what they are made of, with generators that can be followed by hand."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import h5py
import pytest
import torch
from accelerate import Accelerator
from decaying import decaying, operator
from factual import CIRCLE

from ups.eval import choices
from ups.eval.ensemble import dressed, member_noise, roll_out_members
from ups.eval.forecasts import rolled_out, start
from ups.eval.metrics import crps
from ups.eval.truth import against_truth, compare
from ups.files import write_json
from ups.models.body import BodyConfig
from ups.models.generators import Diffusion, Ensemble, Perturbed
from ups.models.latent_operator import LatentOperator, TaskSpec, latest
from ups.stages import preferred

SIZES = dict(dim=16, depth=2, modes=4, kernel=3)
TASK = TaskSpec("a", (1, 1, 8), 2, CIRCLE, conserved_directions=((0.5, 2.0),))


class Adds:
    """Doubles a state, adds its input and noise."""

    perturbation = None

    def numbers(self, task):
        return 8

    def step(self, z, dt, cond, task, noise, inputs=None):
        return 2 * z + dt[:, None, None] + noise.unflatten(1, (4, 2)) + inputs


def test_every_member_is_fed_back_with_numbers_of_its_own():
    z, dt, inputs = torch.randn(3, 4, 2), torch.tensor([1.0, 2.0, 3.0]), torch.randn(3, 5, 4, 2)
    noise = functools.partial(member_noise, 7, [4, 0, 9], 5, "cpu")
    rolled = roll_out_members(Adds(), z, 3, dt, torch.zeros(3, 0), 0, noise, 0.0, inputs)
    z = z[:, None].expand(3, 5, 4, 2)
    for k, members in enumerate(rolled, start=1):
        added = noise(k, 8).unflatten(2, (4, 2)) + inputs[:, k - 1, None]
        z = 2 * z + dt[:, None, None, None] + added
        torch.testing.assert_close(members, z)
    rows = list(roll_out_members(Adds(), z[:, 0], 2, dt, torch.zeros(3, 0), 0, noise, 0.0, inputs))
    few = roll_out_members(Adds(), z[:, 0], 2, dt, torch.zeros(3, 0), 0, noise, 0.0, inputs, 2)
    assert all(map(torch.equal, rows, few))


def test_numbers_are_normal_and_belong_to_seed_trajectory_member_and_step():
    x = member_noise(0, [3, 5], 8, "cpu", 1, 40_001)
    assert x.shape == (2, 8, 40_001) and abs(x.mean()) < 0.005 and abs(x.var() - 1) < 0.01
    assert abs(x.pow(4).mean() - 3) < 0.05 and 4 < x.abs().max() < 7
    rest = (x[..., :20_000] * x[..., 20_001:]).mean(2), (x[0] * x[1]).mean(1), (x[:, 0] * x[:, 1])
    assert max(part.mean(-1).abs().max() for part in rest) < 0.03  # independent
    assert torch.equal(member_noise(0, torch.tensor([5, 3]), 2, "cpu", 1, 40_001), x[[1, 0], :2])
    for other in (member_noise(1, [3], 1, "cpu", 1, 9), member_noise(0, [3], 1, "cpu", 2, 9),
                  x[0, 1, :9], x[1, 0, :9]):
        assert not torch.isclose(other.flatten(), x[0, 0, :9]).any()


def test_perturbed_inputs_keep_means_and_are_carried_by_the_operator():
    z, scale = torch.randn(2, 4, 2), torch.tensor([1.0, 0.5])
    noise = functools.partial(member_noise, 0, [0, 1], 300, "cpu")
    members = list(roll_out_members(Perturbed(lambda z, *_: 2 * z, [9.0, 0.1]), z, 3, torch.ones(2),
                                    torch.zeros(2, 0), 1, noise, scale))
    first = members[2] / 8 - z[:, None]
    assert first.mean(2).abs().max() < 1e-6
    size = first.square().mean((0, 1, 2)).sqrt() / (0.75**0.5 * 0.1)  # four tokens, less their mean
    torch.testing.assert_close(size, scale, rtol=0.05, atol=0)


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("kind, calls", [("ensemble", 1), ("diffusion", 3), ("consistency", 1),
                                         ("consistency", 2)])
def test_going_on_from_a_frame_with_the_same_numbers_gives_the_next(kind, calls, history):
    """Of members that keep conserved means, and in as many calls of the network as were asked."""
    torch.manual_seed(0)
    sizes, task = BodyConfig(**SIZES), [dataclasses.replace(TASK, history=history)]
    model = Ensemble(sizes, task) if kind == "ensemble" else Diffusion(
        sizes, task, LatentOperator(sizes, task), kind, calls)
    model.law.fit(0, [(torch.randn(200, 8, 2), 0.1 * torch.randn(200, 8, 2))])
    for name, p in model.requires_grad_(False).named_parameters():
        if "modulation" in name or "out" in name:
            torch.nn.init.normal_(p, std=0.1)
    made = []
    model.register_forward_hook(lambda *_: made.append(1))
    noise = functools.partial(member_noise, 0, [0, 1], 3, "cpu")
    dt, cond, z0 = torch.ones(2), torch.zeros(2, 0), torch.randn(2, history, 8, 2).squeeze(1)
    frames = list(roll_out_members(model, z0, 4, dt, cond, 0, noise, 0.0))
    assert len(made) == 4 * calls
    seen = torch.stack(frames[3 - history : 3], 2).squeeze(2)  # the last frames of each member
    again = [model.step(seen[:, m], dt, cond, 0, noise(4, model.numbers(0))[:, m])
             for m in range(3)]
    torch.testing.assert_close(torch.stack(again, 1), frames[3])
    spread = frames[3].std(1).mean()
    moved = (frames[3] - latest(z0)[:, None]).mean(2) @ torch.tensor([0.5, 2.0])
    assert moved.abs().max() < 1e-4 < 1e-2 < spread, spread


def test_a_dressing_has_the_size_of_the_operators_error_on_val():
    task = decaying()
    chosen = task.fields.split("test")
    s = start(task, chosen, chosen, "cpu")
    members = list(dressed(operator, task, 0, 64)(s))
    alone = list(rolled_out(task, 0, operator)(s))
    for k in (1, 12):
        assert (members[k - 1].mean(1) - alone[k - 1][:, 0]).abs().max() < 5 * members[-1].std()
        error = (alone[k - 1][:, 0] - s.u[:, k]).square().mean().sqrt()
        assert members[k - 1].std(1).mean() == pytest.approx(error.item(), rel=0.3)


def test_against_the_truth_each_measure_is_one_where_members_are_the_truths_own():
    """Two draws of one distribution; then a shifted, and a too narrow one."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(256, 1, 16, 16, generator=generator)
    x = torch.randn(64, 1, 16, 16, generator=generator)
    found = [compare(p, truth, high=4) for p in (x, x + 0.5, 0.5 * x)]
    same, moved, narrow = ({name: (ours / true).item() for name, (ours, true) in one.items()}
                           for one in found)
    assert abs(same.pop("mean")) < 0.005 and moved["mean"] == pytest.approx(0.25, abs=0.02)
    assert all(value == pytest.approx(1, abs=0.05) for value in same.values())
    each = sum(crps(x[None], y[None]).item() for y in truth) / len(truth)  # of each true one
    assert found[0]["crps"][0].item() == pytest.approx(each, rel=1e-4)
    assert narrow["spread"] == pytest.approx(0.25, abs=0.01)
    assert narrow["energy"] == pytest.approx(0.25, abs=0.02)
    assert moved["crps_block"] > 3 > 1.3 > moved["crps"] > 1.1


def test_the_file_of_a_truth_is_read_at_its_leads(tmp_path):
    """Members that are moved by half of the true spread, around the stored solution."""
    task, random = decaying(), torch.Generator().manual_seed(1)
    chosen = task.fields.split("test")[1:4]
    u = task.fields.read(chosen)[:, [1, 3], None]
    draws = u + 0.1 * torch.randn(3, 2, 256, 2, 16, generator=random)
    with h5py.File(tmp_path / "a.truth", "w") as f:
        f["trajectory"], f["lead"], f["u"] = chosen, [1, 3], draws

    def moved(s):
        for k in range(1, s.steps + 1):
            y = s.u[:, k, None]
            yield y + 0.05 + 0.1 * torch.randn(1, 64, 2, 16, generator=random)

    found = against_truth(Accelerator(cpu=True), task, tmp_path / "a.truth", {"moved": moved})
    scores = found["scores"]["moved"]
    assert found["leads"] == [1, 3] and scores["mean"] == pytest.approx([0.5, 0.5], abs=0.05)
    assert scores["spread"] == pytest.approx([1, 1], abs=0.05)
    assert min(scores["crps_block"]) > min(scores["crps"]) > 1.05


def test_validation_chooses_one_attribute_after_the_other_for_each_task(tmp_path, monkeypatch):
    calls = []

    def score(accelerator, operator, generator, task, index):
        calls.append((generator.strength[index], generator.perturbation[index]))
        return abs(generator.strength[index] - 0.4 - 0.2 * index) + generator.perturbation[index]

    monkeypatch.setattr(choices, "val_score", score)
    run = SimpleNamespace(folder=tmp_path, accelerator=SimpleNamespace(is_main_process=True))
    write_json(tmp_path / "choices.json", {"a": {"plans": {}}})
    generator, tasks = Adds(), [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    choices.choose_members(run, None, generator, tasks, strength=[(1.0, 0.7, 0.5)] * 2,
                           perturbation=[(0.0, 0.1), (0.0, -0.1)])
    assert generator.strength == [0.5, 0.7] and generator.perturbation == [0.0, -0.1]
    chosen = json.loads((tmp_path / "choices.json").read_text())
    assert chosen["a"] == {"plans": {}, "strength": 0.5, "perturbation": 0.0,
                           "crps_ratio": pytest.approx(0.1)}
    assert calls[2:5] == [(0.5, 0.0), (0.5, 0.0), (0.5, 0.1)] and len(calls) == 10


def test_a_run_says_which_generator_val_prefers(tmp_path):
    for stage, score, end in (("operator", 0.6, "done"), ("ensemble", 0.5, "done"),
                              ("diffusion", 0.4, "stopped")):
        (tmp_path / stage).mkdir()
        write_json(tmp_path / stage / "choices.json", {"a": {"crps_ratio": score}})
        write_json(tmp_path / stage / "exit.json", {"status": end})
    assert preferred(tmp_path, "a") == "ensemble" and preferred(tmp_path, "other") == "operator"
