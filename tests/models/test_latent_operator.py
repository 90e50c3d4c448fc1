"""The operator starts as the identity, heeds its condition, commutes with shifts, on any grid."""

import dataclasses
import math
import re

import factual
import pytest
import torch
import torch.nn.functional as F
from factual import CIRCLE, WALLS

from ups.models import fourier
from ups.models.attention import WindowAttention
from ups.models.body import BODIES, BodyConfig
from ups.models.fourier import FourierMixer, fourier_basis
from ups.models.latent_operator import LatentOperator, TaskSpec
from ups.models.layers import Grid, PerTask, bounded

LINE = TaskSpec("line", (1, 1, 32), 4, CIRCLE, ("nu",))
PLATE = TaskSpec("plate", (1, 9, 16), 6, WALLS, ("beta", "nu"))
CUBE = TaskSpec("cube", (4, 4, 4), 3, CIRCLE)
MIX = (LINE, PLATE, CUBE)


each_body = pytest.mark.parametrize("body", BODIES)


def make(body, tasks=(LINE,), started=True, **options):
    """A small operator; `started` moves the zero-initialised weights away from zero."""
    torch.manual_seed(0)
    options = {"dim": 16, "depth": 3, "heads": 2, "modes": 8, "window": 4} | options
    model = LatentOperator(BodyConfig(body=body, **options), tasks)
    return factual.started(model) if started else model


def batch(model, task=0, size=2, dtype=torch.float32):
    spec = model.tasks[task]
    generator = torch.Generator().manual_seed(1)
    z = torch.zeros(size, math.prod(spec.tokens), model.width)
    z[..., :spec.width] = torch.randn(z[..., :spec.width].shape, generator=generator)
    cond = torch.randn(size, max(len(t.params) for t in model.tasks), generator=generator)
    return z.to(dtype), torch.linspace(0.01, 1, size, dtype=dtype), cond.to(dtype)


@each_body
@pytest.mark.parametrize("task", range(3))
def test_starts_as_the_identity_and_every_parameter_has_a_gradient(body, task):
    z0, dt, cond = batch(model := make(body, MIX), task)
    z0[..., MIX[task].width:] = 7.0
    assert torch.equal(make(body, MIX, started=False)(z0, dt, cond, task), z0)
    z1 = model(z0, dt, cond, task)
    z1.square().sum().backward()
    for name, p in model.named_parameters():  # all but what is another task's own
        owner = re.search(r"\.(?:inp|out|task|mixer|mlp)\.(\d+)", name)
        assert (p.grad is not None) == (not owner or int(owner[1]) == task), name
    assert torch.equal(z1[..., MIX[task].width:], z0[..., MIX[task].width:])  # padding
    assert (z1 - z0)[..., :MIX[task].width].abs().amin(-1).max() > 0
    assert model.body.task[task].grad.abs().sum() > 0


@each_body
@pytest.mark.parametrize("tokens", [(1, 1, 32), (1, 16, 32)])
def test_shifting_a_periodic_input_shifts_the_output(body, tokens):
    """pdet holds to it for whole windows."""
    model = make(body, [TaskSpec("t", tokens, 3, CIRCLE)]).double()
    z0, dt, cond = batch(model, dtype=torch.float64)
    step = 4 if body == "pdet" else 3

    def shift(z):
        axes = [a for a in (1, 2, 3) if tokens[a - 1] > 1]
        return z.unflatten(1, tokens).roll([step] * len(axes), axes).flatten(1, 3)

    moved = model(shift(z0), dt, cond)
    torch.testing.assert_close(moved, shift(model(z0, dt, cond)), rtol=0, atol=1e-5)
    assert (moved - model(z0, dt, cond)).abs().max() > 0.1


@each_body
def test_dt_parameters_boundary_and_task_enter(body):
    model = make(body, [LINE, TaskSpec("other", LINE.tokens, 4, CIRCLE, ("nu",)),
                        TaskSpec("closed", LINE.tokens, 4, WALLS, ("nu",))])
    z0, dt, cond = batch(model)
    z1 = model(z0, dt, cond)
    asked_once = model.modulate(dt, cond)  # as a roll-out does
    assert torch.equal(model(z0, dt, cond, modulation=asked_once), z1)
    for other in (model(z0, 2 * dt, cond), model(z0, dt, cond.flip(0)), model(z0, dt, cond, 1),
                  model(z0, dt, cond, 2)):
        assert (other - z1).abs().max() > 1e-3


@each_body
def test_autocast_compile_and_state_dict(body):
    """bf16 stays near float32; one graph without breaks; only weights are saved."""
    model = make(body, MIX, depth=2)
    again = make(body, MIX, started=False, depth=2)
    again.load_state_dict(model.state_dict())
    assert not any("grid" in name for name in model.state_dict())
    inputs = batch(model, 1)
    z1 = model(*inputs, 1)
    assert torch.equal(again(*inputs, 1), z1)

    with torch.autocast("cpu", torch.bfloat16):
        rough = model(*inputs, 1)
    assert rough.dtype == torch.float32
    assert (rough - z1).norm() < 0.05 * (z1 - inputs[0]).norm()

    torch.compiler.reset()
    model.compile(dynamic=False, fullgraph=True,
                  backend="aot_eager" if body == "fourier" else "eager")
    compiled = model(*inputs, 1)
    compiled.sum().backward()
    torch.testing.assert_close(compiled, z1)


@pytest.mark.parametrize("values, words", [
    (dict(body="unet"), "not one of"),
    (dict(dim=36, heads=8), r"multiple of 2 \* heads"), (dict(kernel=4), "kernel 4 must be odd"),
    (dict(modes=-1), "modes must be at least 0, not -1")])
def test_wrong_configurations_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        BodyConfig(**values)


@pytest.mark.parametrize("periodic", [True, False])
def test_fourier_tables_keep_what_they_resolve(periodic):
    """With R = 1 and I = 0 the tables project on the waves kept; I = 1 turns cos into sin."""
    n, modes = 24, 5
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n * (2 * math.pi if periodic else math.pi)
    analysis, synthesis = fourier_basis(n, modes, periodic)
    low, high = torch.cos(3 * x) + (torch.sin(4 * x) if periodic else 0), torch.cos(7 * x)
    c = (analysis @ (low + high)).view(modes, -1)
    real = synthesis.view(n, modes, -1, 2)
    torch.testing.assert_close((real[..., 0] * c).sum((1, 2)), low, rtol=0, atol=1e-12)
    c = (analysis @ torch.cos(3 * x)).view(modes, -1)
    torch.testing.assert_close((real[..., 1] * c).sum((1, 2)), torch.sin(3 * x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("tokens", [(1, 6, 6), (7, 1, 7)])
def test_waves_along_both_axes_at_once_are_those_along_one_after_the_other(
        monkeypatch, tokens, periodic):
    axes = [axis for axis, n in enumerate(tokens) if n > 1]
    mixer = FourierMixer(4, axes, 3, 3).double()
    x = torch.randn(2, *tokens, 4, dtype=torch.float64)
    periodic = (periodic,) * 3
    together = mixer.tables(tokens, periodic)
    monkeypatch.setattr(fourier, "SMALL", 0)
    apart = mixer.tables(tokens, periodic)
    assert len(together) == 2 and len(apart) == 2 * len(axes)
    one, other = (mixer(x, Grid(periodic, tuple(tables))) for tables in (together, apart))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("periodic", [True, False])
def test_without_waves_tokens_mix_by_a_separable_star_shaped_convolution(periodic):
    mixer, x = FourierMixer(3, [1, 2], 0, 5).double(), torch.randn(2, 1, 6, 7, 3).double()
    assert mixer.tables((1, 6, 7), (periodic,) * 3) == []
    taps = mixer.taps.view(9, 3).T  # the centre, then -2, -1, 1, 2 along each axis
    star = torch.zeros(3, 1, 5, 5).double()
    star[:, 0, 2, 2] = taps[:, 0]
    for k, at in enumerate((0, 1, 3, 4)):
        star[:, 0, at, 2], star[:, 0, 2, at] = taps[:, 1 + k], taps[:, 5 + k]
    padded = F.pad(x[:, 0].movedim(-1, 1), (2,) * 4, mode="circular" if periodic else "replicate")
    expected = F.conv2d(padded, star, groups=3).movedim(1, -1) @ mixer.local.T
    y = mixer(x, Grid((periodic,) * 3, ()))[:, 0]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_a_kernel_wider_than_the_circle_goes_around_it():
    mixer, x = FourierMixer(3, [2], 0, 9).double(), torch.randn(2, 1, 1, 3, 3).double()
    taps = mixer.taps.view(9, 3)
    places = (0, -4, -3, -2, -1, 1, 2, 3, 4)  # of the taps: the centre comes first
    near = sum(x.roll(-at, 3) * tap for at, tap in zip(places, taps, strict=True))
    expected = near @ mixer.local.T
    torch.testing.assert_close(mixer(x, Grid(CIRCLE, ())), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("modes", [0, 8])
def test_a_single_token_mixes_its_channels_alone(modes):
    mixer, x = FourierMixer(4, [], modes, 5).double(), torch.randn(2, 1, 1, 1, 4).double()
    mixed = mixer(x, Grid(CIRCLE, tuple(mixer.tables((1, 1, 1), CIRCLE))))
    torch.testing.assert_close(mixed, x * mixer.taps[:4] @ mixer.local.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n, periodic, shifted, reached", [
    (16, True, False, [0, 1, 2, 3]), (16, True, True, [0, 1, 14, 15]), (16, False, True, [0, 1]),
    (14, True, True, [0, 1]), (3, False, True, [0, 1, 2])])
def test_windows_join_neighbours_only(n, periodic, shifted, reached):
    """Which outputs the first token reaches; padded windows (14) do not close the circle."""
    torch.manual_seed(0)
    mixer = WindowAttention(8, 2, 4, shifted)
    periodic = (periodic,) * 3
    grid = Grid(periodic, tuple(t.float() for t in mixer.tables((1, 1, n), periodic)))
    x = torch.randn(1, 1, 1, n, 8)
    y = x + torch.nn.functional.pad(torch.ones(1, 8), (0, 0, 0, n - 1))
    change = (mixer(y, grid) - mixer(x, grid)).abs().amax((0, 1, 2, 4))
    assert change.nonzero().flatten().tolist() == reached


@each_body
def test_what_the_equation_conserves_never_changes(body):
    """The mean over tokens of w . z, whatever the weights; other means move."""
    w = (0.5, -1.0, 0.25, 2.0)
    model = make(body, [dataclasses.replace(LINE, conserved_directions=(w,)), PLATE]).double()
    torch.nn.init.normal_(model.body.out[0].weight)
    z0 = torch.randn(3, 32, 6, dtype=torch.float64)
    z1 = model(z0, torch.ones(3).double(), torch.zeros(3, 2).double())
    moved = (z1 - z0)[..., :4].mean(1)
    assert (moved @ torch.tensor(w).double()).abs().max() < 1e-6 < 0.01 < moved.abs().max()


@each_body
def test_a_step_grows_no_faster_than_its_input(body):
    """Products of features alone would make a state that is too large grow without limit."""
    model = make(body)
    z0, dt, cond = batch(model)
    sizes = [(model(scale * z0, dt, cond) - scale * z0).norm() for scale in (1e4, 1e6)]
    assert 10 < sizes[1] / sizes[0] < 110
    x = torch.randn(2, 1, 1, 8, 16)
    assert torch.allclose(bounded(0.1 * x), 0.1 * x, rtol=2e-3)  # small: as it is
    assert torch.allclose(bounded(1e4 * x).square().mean(-1).sqrt(), torch.tensor(4.0))


def test_the_condition_is_bounded():
    """However large its weights grow, and whatever the parameters are."""
    model = make("fourier")
    _, dt, cond = batch(model)
    sizes = []
    for weight in (1e4, 1e8):
        torch.nn.init.constant_(model.body.task[0], weight)
        sizes.append(max(m.abs().max() for block in model.modulate(dt, weight * cond)
                         for m in block))
    assert 0.5 < sizes[0] < 10 and abs(sizes[1] - sizes[0]) < 1e-3


@each_body
def test_a_step_is_in_units_of_the_typical_change(body):
    z, change = torch.randn(2, 32, 4), (0.1, 3.0, 0.0, 1.0)
    plain, scaled = make(body), make(body, [dataclasses.replace(LINE, change=change)])
    moves = [model(z, torch.full((2,), 0.1), torch.zeros(2, 1)) - z for model in (plain, scaled)]
    assert moves[0].abs().max() > 0.01
    assert torch.allclose(moves[1], moves[0] * torch.tensor(change), atol=1e-6)


def test_a_history_is_read_and_the_last_frame_is_changed():
    spec, z = dataclasses.replace(LINE, history=3), torch.randn(2, 3, 32, 4)
    dt, cond = torch.full((2,), 0.1), torch.zeros(2, 1)
    assert torch.equal(make("fourier", [spec], started=False)(z, dt, cond), z[:, -1])
    model = make("fourier", [spec])
    moves = model(z, dt, cond) - z[:, -1]
    for frame in range(3):
        other = z.clone()
        other[:, frame] += 1
        assert (model(other, dt, cond) - other[:, -1] - moves).abs().max() > 1e-3


def test_each_stride_has_a_typical_change_of_its_own():
    """Chosen row by row by the nearest dt; the identity and conserved means hold for all of them"""
    z, changes = torch.randn(3, 32, 4), ((0.1, 3.0, 0.0, 1.0), (0.2, 5.0, 0.0, 1.5))
    spec = dataclasses.replace(LINE, change=changes, dts=(0.1, 0.4),
                               conserved_directions=((1.0, 0.0, 0.0, 0.0),))
    dt, cond = torch.tensor([0.1, 0.4, 0.05]), torch.zeros(3, 1)
    assert torch.equal(make("fourier", [spec], started=False)(z, dt, cond), z)
    ones = dataclasses.replace(spec, change=(), dts=())
    moves = [make("fourier", [one])(z, dt, cond) - z for one in (ones, spec)]
    units = torch.tensor(changes)[[0, 1, 0]][:, None]
    assert torch.allclose(moves[1], moves[0] * units, atol=1e-6)
    assert moves[1][..., 0].mean(1).abs().max() < 1e-7 < moves[1][..., 1].mean(1).abs().min()


def test_every_second_block_has_an_mlp_for_each_task(body="fourier"):
    """Another task's MLP does not touch a result, its own does; a single task has nothing twice."""
    model = make(body, MIX, depth=4)
    chain = model.body.blocks
    assert [isinstance(block.mlp, PerTask) for block in chain] == [False, True, False, True]
    inputs = batch(model, 1)
    before = model(*inputs, 1)
    torch.nn.init.ones_(chain[1].mlp[0].inp.weight)
    assert torch.equal(model(*inputs, 1), before)
    torch.nn.init.ones_(chain[1].mlp[1].inp.weight)
    assert not torch.equal(model(*inputs, 1), before)
    assert not any(isinstance(b.mlp, PerTask) for b in make(body, depth=4).body.blocks)


@each_body
def test_latents_go_in_half_whitened(body):
    """`weight` is the variance that a channel has in the field."""
    plain = make(body)
    weight = (1.5**2, 1.0, 0.75**2, 0.25**2)
    seen = make(body, [dataclasses.replace(LINE, weight=weight)])
    z, dt, cond = batch(plain)
    scale = torch.tensor([1.5, 1.0, 0.75, 0.25]).sqrt()
    scaled = z * scale / scale.square().mean().sqrt()
    assert torch.allclose(seen(z, dt, cond) - z, plain(scaled, dt, cond) - scaled, atol=1e-6)


@each_body
def test_weights_of_another_run_match_by_name(body):
    """One task of three goes on, with a parameter that the parent did not know, and finer."""
    plate = dataclasses.replace(PLATE, periodic=(True, False, False))
    parent = make(body, (LINE, plate, CUBE), depth=4)
    tasks = [dataclasses.replace(plate, params=("kappa", "nu"))]
    z, dt, cond = batch(parent, 1)
    cond[:, 0] = 0
    child = make(body, tasks, depth=4, started=False)
    child.take(parent, [1])
    if body != "plain":  # whose wave numbers are those of all grids
        torch.testing.assert_close(child(z, dt, cond), parent(z, dt, cond, 1))
    torch.testing.assert_close(child(z, dt, cond + torch.tensor([1.0, 0.0])), child(z, dt, cond))
    fine, coarse = (make(body, [dataclasses.replace(LINE, tokens=(1, 1, n))]) for n in (32, 8))
    waves = coarse.body.blocks[0].mixer[0].modes if body == "fourier" else None
    fine.take(coarse, [0])
    if body == "fourier":
        modes = fine.body.blocks[0].mixer[0].modes
        assert len(waves) == 5 < len(modes) and not modes[5:].any()
        assert torch.equal(modes[:5], waves)


@each_body
def test_each_axis_has_a_boundary_of_its_own(body):
    """A channel: shifts along the periodic axis commute, those along the closed one do not."""
    spec = TaskSpec("channel", (1, 16, 16), 3, (True, True, False), inputs=2)
    model = make(body, [spec], depth=3).double()
    z0, dt, cond = batch(model, dtype=torch.float64)
    given = torch.randn(2, 256, 2, dtype=torch.float64)
    z1 = model(z0, dt, cond, inputs=given)
    differences = []
    for axis in (2, 3):
        def shift(z, by, axis=axis):
            return z.unflatten(1, spec.tokens).roll(by, axis).flatten(1, 3)

        again = shift(model(shift(z0, 8), dt, cond, inputs=shift(given, 8)), -8)
        differences.append((again - z1).abs().max())
    assert differences[0] < 1e-5 and differences[1] > 1e-2


@pytest.mark.parametrize("tokens, mixed", [((1, 6, 6), (True, True, False)),
                                           ((4, 3, 5), (False, True, False))])
def test_waves_of_a_mixed_grid_are_those_of_each_axis(tokens, mixed):
    axes = [axis for axis, n in enumerate(tokens) if n > 1]
    mixer, x = FourierMixer(4, axes, 3, 1).double(), torch.randn(2, *tokens, 4).double()
    y = mixer(x, Grid(mixed, tuple(mixer.tables(tokens, mixed))))
    expected = x * mixer.taps[:4] @ mixer.local.T
    for k, axis in enumerate(axes):
        line = FourierMixer(4, [2], 3, 1).double()
        line.modes.data = mixer.modes.data[:, k:k + 1]
        torch.nn.init.zeros_(line.local)
        along = x.movedim(axis + 1, 3)
        circle = (True, True, mixed[axis])
        grid = Grid(circle, tuple(line.tables((1, 1, tokens[axis]), circle)))
        one = line(along.reshape(-1, 1, 1, tokens[axis], 4), grid).view(along.shape)
        expected = expected + one.movedim(3, axis + 1)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@each_body
def test_inputs_are_read_at_every_step(body):
    """Nothing at the start, then they count; each task has its own width, or none."""
    given = dataclasses.replace(LINE, inputs=5)
    model = make(body, [given, PLATE], started=False)
    z0, dt, cond = batch(model)
    z0[..., 4:] = 0
    v = torch.randn(2, 32, 5)
    assert torch.equal(model(z0, dt, cond, 0, v), z0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(2):  # the last layer first
        optimizer.zero_grad()
        (model(z0, dt, cond, 0, v) - z0 - v[..., :1]).square().mean().backward()
        optimizer.step()
    assert model.body.inp[0].weight.grad[:, 6:11].abs().amin(0).min() > 0
    assert (model(z0, dt, cond, 0, v) - model(z0, dt, cond, 0, -v)).abs().max() > 1e-4
    with pytest.raises(ValueError, match="line is given input tokens of 5 values"):
        model(z0, dt, cond)
    with pytest.raises(ValueError, match="do not fill a token grid"):
        model(z0[:, 1:], dt, cond, 0, v[:, 1:])
    model(*batch(model, 1), 1)
