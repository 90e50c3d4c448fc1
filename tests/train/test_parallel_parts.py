"""Every part of the operator trains on two processes, DDP or FSDP2, as it does on one.

Float64 weights, averages, gradients and losses to 1e-9. In bf16 the order of a sum is seen: there
the losses agree to 1e-3 of their size and the weights to a tenth of the way that Adam can go.
"""

import json
import re
from pathlib import Path

import parts
import pytest
import torch
from launching import launch
from parts import PARTS, RESUMED, SAVED, STEPS
from safetensors.torch import load_file

from ups.models.latent_operator import LatentOperator
from ups.train.checkpoint import load_model, read_checkpoint

WAY = 1e-2 * sum(1 / (1 + k) for k in range(STEPS))  # Adam's steps: lr * schedule, at most
STRATEGIES = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    for name in PARTS:
        parts.train(name, "one", folder / name / "one")
    script = Path(parts.__file__)
    done = launch(script, folder, config="2gpu_fsdp.yaml")
    assert done.returncode == 0, done.stderr[-6000:]
    for name in RESUMED:
        parts.go_on(name, "fsdp", "one", folder)
    return folder


def read(folder, rank=0):
    """What a rank recorded: (record, {kind/name: tensor})."""
    record = json.loads((folder / f"rank{rank}.json").read_text())
    return record, load_file(folder / f"rank{rank}.safetensors")


def gap(a, b, kind=""):
    names = {name for name in a if name.startswith(kind)}
    assert names and names == {name for name in b if name.startswith(kind)}
    return max(float((a[name] - b[name]).abs().max()) for name in names)


def mean_gap(a, b, kind):
    gaps = torch.cat([(a[n] - b[n]).abs().flatten() for n in a if n.startswith(kind)])
    return float(gaps.mean())


def assert_equal_run(part, expected, got, start=0):
    (record, tensors), (other, others) = expected, got
    exact = PARTS[part].precision == "no"
    losses = torch.tensor([record["losses"][start:], other["losses"]], dtype=torch.float64)
    assert losses.shape[1] == STEPS - start
    assert (losses[0] - losses[1]).abs().max() < (1e-9 if exact else 1e-3 * losses.max())
    for kind in ("model/", "shadow/", "best/"):
        assert gap(tensors, others, kind) < (1e-9 if exact else WAY)
        assert mean_gap(tensors, others, kind) < WAY / 1000  # Adam turns a rounded zero into a step
    if exact:
        assert gap(tensors, others, "grad/") < 1e-9
        norms = torch.tensor([record["norms"][start:], other["norms"]], dtype=torch.float64)
        assert (norms[0] - norms[1]).abs().max() < 1e-9


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_trains_as_on_one_process(runs, part, strategy):
    one, two = read(runs / part / "one"), read(runs / part / strategy)
    assert (one[0]["world"], two[0]["world"]) == (1, 2)
    assert two[0]["kind"].endswith("FSDP" if strategy == "fsdp" else "MULTI_CPU")
    assert_equal_run(part, one, two)
    torch.manual_seed(0)
    like = one[1]["model/body.inp.0.weight"]
    start = LatentOperator(PARTS[part].model, PARTS[part].tasks).to(like)
    still = [name for name, p in start.named_parameters()
             if float((one[1][f"model/{name}"] - p.detach()).abs().max()) < 1e-4]
    assert not still  # every parameter has learned something, so that equality says something


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("part", PARTS)
def test_every_rank_has_the_gradients_of_the_task_and_the_same_loss(runs, part, strategy):
    (record, tensors), (other, others) = (read(runs / part / strategy, rank) for rank in (0, 1))
    assert record["losses"] == other["losses"] and record["norms"] == other["norms"]
    assert gap(tensors, others) == 0.0
    assert record["with"] == other["with"]
    names = [n for n, _ in LatentOperator(PARTS[part].model, PARTS[part].tasks).named_parameters()]
    for task, found in record["with"]:  # all but what is another task's own
        owners = {name: re.search(r"\.(?:inp|out|task|mixer|mlp)\.(\d+)", name) for name in names}
        assert found == sorted(f"grad/{name}" for name, owner in owners.items()
                               if not owner or int(owner[1]) == task)
    assert all(t.abs().max() > 0 for name, t in tensors.items() if name.startswith("grad/"))


@pytest.mark.parametrize("part", PARTS)
def test_fsdp_holds_half_on_each_rank(runs, part):
    first, second = (read(runs / part / "fsdp", rank)[0] for rank in (0, 1))
    assert first["held"] + second["held"] == first["parameters"]
    assert first["held_moments"] + second["held_moments"] == first["parameters"]
    assert 0.48 < second["held"] / first["parameters"] <= 0.5
    assert first["groups"] == PARTS[part].model.depth + 1  # every Block by itself, and the rest
    whole = read(runs / part / "ddp", 1)[0]
    assert whole["held"] == whole["held_moments"] == whole["parameters"] == first["parameters"]
    assert whole["groups"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("part", PARTS)
def test_exports_and_checkpoints_hold_whole_tensors(runs, part, strategy):
    folder = runs / part / strategy
    _, tensors = read(folder)
    plain = LatentOperator(PARTS[part].model, PARTS[part].tasks)
    _, exported = load_model(folder / "part" / "model")
    plain.load_state_dict(exported)  # names and shapes of a model that was never prepared
    saved, _ = read_checkpoint(folder / "part" / "checkpoints" / f"step_{STEPS}")
    for name, p in plain.named_parameters():
        assert torch.equal(exported[name], tensors[f"shadow/{name}"])  # lent by the average
        assert torch.equal(saved[f"model/{name}"], tensors[f"model/{name}"])
        assert torch.equal(saved[f"ema/{name}"], tensors[f"shadow/{name}"])
        assert torch.equal(saved[f"best/{name}"], tensors[f"best/{name}"])
        assert saved[f"model/{name}"].shape == p.shape


@pytest.mark.parametrize("first, then", [("fsdp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "one"),
                                         ("ddp", "fsdp"), ("one", "fsdp")])
@pytest.mark.parametrize("part", RESUMED)
def test_a_checkpoint_goes_on_under_any_strategy(runs, part, first, then):
    record, tensors = read(runs / part / f"{first}-{then}")
    assert record["start"] == SAVED
    if first == then:  # bit for bit
        reference, others = read(runs / part / first)
        assert record["losses"] == reference["losses"][SAVED:]
        assert gap(tensors, others) == 0.0
    assert_equal_run(part, read(runs / part / "one"), (record, tensors), SAVED)


def test_the_check_for_two_ranks_on_one_card_goes_on_from_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    import two_ranks_one_card as card

    card.work("one", ["fp32", "fp32 one"], tmp_path, cpu=True)
    found = json.loads((tmp_path / "one_rank0.json").read_text())
    first, second = found["fp32"], found["fp32 one"]
    assert second["start"] == card.CASES["fp32"].saved == 10
    assert len(first["losses"]) == 20 and second["losses"] == first["losses"][10:]
