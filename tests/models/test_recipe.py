"""What follows from the data by rule, the dial, and blocks that save time or memory."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from factual import CIRCLE, facts, started

import train_operator
from ups.config import UsageError, flat, parse
from ups.models.body import BodyConfig
from ups.models.codec import PatchCodec, patch_sizes
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.models.layers import compiled
from ups.models.recipe import SIZES, TOKENS, patches, told


@pytest.mark.parametrize("grid, wanted, fitting", [
    ((128,), (4,), (4,)), ((16,), (2,), (2,)), ((6,), (1,), (1,)), ((64, 20), (4, 2), (4, 2)),
    ((512, 512), (4, 4), (4, 4)), ((1024, 1024), (8, 8), (8, 8)), ((128,) * 3, (4,) * 3, (4,) * 3),
    ((256,) * 3, (8,) * 3, (8,) * 3), ((99, 101), (4, 4), (3, 1))])
def test_patches_follow_from_the_grid(grid, wanted, fitting):
    assert patches(grid) == wanted and patch_sizes(grid, wanted) == fitting
    assert math.prod(n / p for n, p in zip(grid, wanted, strict=True)) <= TOKENS


@pytest.mark.parametrize("grid, boundary, words", [
    ((128,), ("periodic",), "32 tokens of 4 points, 3 of 4 components; 8 of 17 waves, kernel 5"),
    ((20, 40), ("closed", "periodic"),
     "10 x 10 tokens of 2 x 4 points, 3 of 8 components; 8 of 10 waves, kernel 3"),
    ((16, 16, 16), ("closed",) * 3,
     "8 x 8 x 8 tokens of 2 x 2 x 2 points, 3 of 8 components; 8 of 8 waves, kernel 3")])
def test_what_the_rules_made_is_told_and_is_what_the_model_has(grid, boundary, words):
    about = facts("demo", grid, ("u",), boundary=boundary).plain()
    sizes, unit = patch_sizes(grid, patches(grid)), 3 - len(grid)
    codec = PatchCodec({"facts": about, "patch": sizes, "width": 3, "offset": 0.5})
    config = BodyConfig(depth=1)
    assert told(codec, config) == words
    model = LatentOperator(config, [TaskSpec("demo", (1,) * unit + codec.tokens, 3,
                                             (True,) * unit + codec.periodic)])
    mixer = model.body.blocks[0].mixer[0]
    axes, kernel = len(grid), int(words[-1])
    assert mixer.modes.shape[:2] == (8, axes)
    assert mixer.taps.numel() == 64 * (1 + axes * (kernel - 1))
    assert told(codec, None) == words.split(";")[0]


def test_the_dial_is_stored_as_plain_numbers_and_single_flags_win(tmp_path):
    small = train_operator.Config(run="r")
    assert parse(train_operator.Config, ["--run", "r"]) == small
    assert parse(train_operator.Config, ["--run", "r", "--size", "s"]) == small
    given = parse(train_operator.Config, ["--run", "r", "--size", "l", "--lr", "8e-3",
                                          "--model.modes", "8"])  # the defaults of s, but said
    assert (given.lr, given.model.modes, given.model.dim) == (8e-3, 8, SIZES["l"]["model.dim"])
    rest = SIZES["l"] | {"lr": 8e-3, "model.modes": 8, "size": "l", "run": "r"}
    assert flat(given) == flat(small) | rest

    path = tmp_path / "config.json"
    path.write_text(json.dumps(flat(given)))
    assert parse(train_operator.Config, ["--config", str(path)]) == given
    again = parse(train_operator.Config, ["--config", str(path), "--size", "s", "--steps", "7"])
    assert flat(again) == flat(small) | {"steps": 7}
    with pytest.raises(UsageError, match="--size xxl: it is one of s, m, l, xl"):
        parse(train_operator.Config, ["--size", "xxl"])


@pytest.mark.parametrize("size, millions", [("s", (0.7, 1.2)), ("m", (3, 6)), ("l", (20, 45)),
                                            ("xl", (130, 270))])
def test_a_size_has_so_many_parameters(size, millions):
    options = {key.removeprefix("model."): value for key, value in SIZES[size].items()
               if key.startswith("model.")}
    for tokens in ((1, 1, 64), (1, 64, 64)):
        with torch.device("meta"):
            model = LatentOperator(BodyConfig(**options), [TaskSpec("t", tokens, 8, CIRCLE)])
        count = sum(p.numel() for p in model.parameters()) / 1e6
        assert millions[0] < count < millions[1]


def gradients(model, z0):
    model.zero_grad()
    z1 = model(z0, torch.full((2,), 0.1), torch.zeros(2, 0))
    (z1 - z0).square().sum().backward()
    return [z1.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return started(LatentOperator(BodyConfig(dim=16, depth=2, modes=3), [
        TaskSpec("t", (1, 6, 8), 4, (True, True, False))]))


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputed_activations_give_the_same_gradients(model, compiled):
    z0, kept = torch.randn(2, 48, 4), []
    before = gradients(model, z0)
    for block in model.body.blocks:
        block.recompute = True
    if compiled:
        torch.compiler.reset()
        model.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t,
                                                  lambda t: t):
        after = gradients(model, z0)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0 if not compiled else 1e-5, atol=1e-6 * compiled)
    assert compiled or sum(kept) < 30_000  # 90,000 without


def test_bfloat16_is_for_training_and_the_stream_stays_float32(model):
    config = BodyConfig(**asdict(model.body.config) | {"precision": "bfloat16"})
    z0, streams = torch.randn(2, 48, 4), []
    exact = gradients(model, z0)
    model.body.config = config
    for block in model.body.blocks:
        block.register_forward_hook(lambda *call: streams.append(call[2].dtype))
    rough = gradients(model, z0)
    assert rough[0].dtype == torch.float32 and streams == [torch.float32] * 2
    gaps = [(a - b).norm() / a.norm() for a, b in zip(exact, rough, strict=True)]
    assert 1e-5 < gaps[0] < 1e-2 and max(gaps) < 0.1
    arguments = z0, torch.full((2,), 0.1), torch.zeros(2, 0)
    with torch.no_grad():
        assert torch.equal(model(*arguments), exact[0])
    assert torch.equal(model.eval()(*arguments), exact[0])


@pytest.mark.parametrize("tokens, dim, apart", [((1, 1, 16), 64, False), ((1, 8, 8), 64, False),
                                                ((1, 8, 8), 256, True), ((4, 4, 4), 64, True)])
def test_what_would_compile_for_minutes_is_compiled_block_by_block(tokens, dim, apart):
    spec = TaskSpec("t", tokens, 4, (True, True, True))
    model = compiled(LatentOperator(BodyConfig(dim=dim, depth=2, modes=2), [spec]))
    parts = [m for m in model.modules() if m._compiled_call_impl is not None]
    assert parts == (list(model.body.blocks) if apart else [model])


@pytest.mark.parametrize("body, graphs", [("fourier", 1), ("plain", 1), ("pdet", 2)])
def test_all_blocks_of_a_kind_are_compiled_once(body, graphs, monkeypatch):
    """Of pdet, every second one shifts its windows. More than a few variants would be an error."""
    found, config = [], BodyConfig(body=body, dim=64, depth=14, modes=2, window=2)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx",
                        lambda graph, *_, **__: found.append(graph) or graph.forward)
    torch._dynamo.reset()
    model = LatentOperator(config, [TaskSpec("t", (4, 4, 4), 4, (True, True, True))])
    compiled(model)(torch.zeros(1, 64, 4), torch.ones(1), torch.zeros(1, 0)).sum().backward()
    torch._dynamo.reset()
    assert len(found) == graphs
