"""The learned codec: it starts as the patch codec and respects boundaries."""

import json
import math

import pytest
import torch
from factual import facts, smooth

from ups.models.any_point import interpolate
from ups.models.codec import build_codec, fit_patch, truncate
from ups.models.grid_codec import GridCodecConfig, codec_loss, from_patch, measure_weight
from ups.relative_error import mean_relative_error

SMALL = GridCodecConfig(hidden=16, depth=2)
GRIDS = {1: ((32,), 4), 2: ((16, 8), 4), 3: ((8, 4, 8), 2)}


def shocks(count, n=256, seed=0):
    """Two travelling fronts of tanh shape on a smooth wave: what a Burgers solution looks like."""
    generator = torch.Generator().manual_seed(seed)
    place, width, size = torch.rand(3, count, 1, generator=generator, dtype=torch.float64)
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    away = (x - place) - (x - place).round()
    saw = (0.5 + size) * (2 * away - torch.tanh(away / (0.01 + 0.04 * width)))
    return (saw + 0.3 * torch.sin(2 * math.pi * (x + 2 * width))).float()[:, None]


def start(u, width, patch=4, boundary="periodic", cfg=SMALL, offset=0.5, seed=0):
    """The patch codec of `width`, and the grid codec that starts from it."""
    grid = tuple(u.shape[2:])
    boundary = (boundary,) * len(grid) if isinstance(boundary, str) else boundary
    about = facts("demo", grid, tuple(f"c{i}" for i in range(u.shape[1])), boundary=boundary)
    full = fit_patch(lambda: u.split(16), lambda: u[:4].split(4), facts=about.plain(),
                     patch=(patch,) * len(grid), components="all", offset=offset)
    torch.manual_seed(seed)
    return truncate(full, width), from_patch(full, width, cfg)


def awake(codec, size=0.1, seed=1):
    """Give every layer that starts at zero some weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in codec.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p += size * noise / p[0].numel() ** 0.5
    return codec


def batch_of(codec, u, sigma=0.02, queries=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(math.prod(codec.grid), (queries,), generator=generator)
    index = index.expand(len(u), -1)
    shape = (len(u), math.prod(codec.tokens), codec.width)
    return {"u": u, "index": index, "noise": sigma * torch.randn(shape, generator=generator).to(u)}


@torch.no_grad()
def error(codec, u):
    return mean_relative_error(codec.decode(codec.encode(u)), u).mean().item()


@pytest.mark.parametrize("boundary", ["periodic", "closed"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_starts_as_the_patch_codec(axes, boundary):
    grid, size = GRIDS[axes]
    u = smooth(12, 2, grid)
    patch, codec = start(u, 3, size, boundary)
    z = codec.encode(u)
    assert z.shape == (12, math.prod(codec.tokens), 3) and codec.width == patch.width == 3
    torch.testing.assert_close(codec.free(z), patch.encode(u))
    torch.testing.assert_close(codec.decode(z), patch.decode(patch.encode(u)))
    torch.testing.assert_close(codec.encode(codec.decode(z)), z)  # a projection
    torch.testing.assert_close(codec.weight, patch.weight)
    points = torch.rand(20, axes, dtype=torch.float64)
    torch.testing.assert_close(codec.decode_at(z, points), patch.decode_at(patch.encode(u), points))


def test_latents_are_bounded_and_nothing_is_lost():
    u = smooth(12, 1, (32,))
    _, codec = start(u, 4)
    wild = 30 * u
    z = awake(codec).encode(wild)
    assert codec.free(z).abs().max() > 20 and z.abs().max() < 10
    far = codec.decode(torch.full_like(z, 1e6))  # an operator gone astray
    assert far.isfinite().all()
    _, codec = start(u, 4)  # all four components: still the exact inverse
    assert error(codec, wild) < 1e-9


@pytest.mark.parametrize("axes", [1, 2])
def test_periodic_codec_commutes_with_shifts_by_tokens(axes):
    grid, size = GRIDS[axes]
    u = smooth(6, 2, grid)
    dims = tuple(range(1, 1 + axes))
    for boundary, same in (("periodic", True), ("closed", False)):
        codec = awake(start(u, 3, size, boundary)[1])
        z = codec.encode(u).unflatten(1, codec.tokens)
        moved = codec.encode(u.roll((size,) * axes, tuple(d + 1 for d in dims)))
        gap = (moved.unflatten(1, codec.tokens) - z.roll((1,) * axes, dims)).abs().max()
        assert (gap < 1e-10) == same
        back = codec.decode(moved) - codec.decode(z.flatten(1, axes)).roll(
            (size,) * axes, tuple(d + 1 for d in dims))
        assert (back.abs().max() < 1e-10) == same


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_any_point_decoder_looks_at_the_tokens_around(axes):
    grid, size = GRIDS[axes]
    u = smooth(3, 1, grid)
    codec = awake(start(u, 3, size)[1])
    features = torch.randn(1, math.prod(codec.tokens), 16, dtype=torch.float64, requires_grad=True)
    point = torch.full((1, axes), 0.01, dtype=torch.float64)  # in the first token
    codec.point(features, point).sum().backward()
    touched = features.grad[0].abs().sum(1).view(codec.tokens) > 0
    for axis, t in enumerate(codec.tokens):  # itself and its neighbours, across the boundary
        others = tuple(a for a in range(axes) if a != axis)
        seen = touched.any(dim=others) if others else touched
        near = {0, 1 % t, t - 1}
        assert {i for i in range(t) if seen[i]} == near
    # continuous where the nearest token changes
    edge = torch.full((1, axes), 0.37, dtype=torch.float64)
    edge[0, 0] = size / grid[0]
    low, high = (codec.point(features, edge + s * 1e-7) for s in (-1, 1))
    assert (low - high).abs().max() < 1e-4 < codec.point(features, edge).abs().max()


def test_reading_between_the_grid_points():
    fine = shocks(32, 512)
    u = fine[..., ::2]
    codec = start(u, 8, 8, offset=0.25)[1]  # value i of 256 stands at (2 i + 1/2) / 512
    points = ((torch.arange(512, dtype=torch.float64) + 0.5) / 512)[:, None]
    reads = {"codec": codec.decode_at(codec.encode(u), points),
             "linear": interpolate(u, points, (True,), 0.25, False),
             "fourier": interpolate(u, points, (True,), 0.25)}
    errors = {name: mean_relative_error(read.mT, fine) for name, read in reads.items()}
    torch.testing.assert_close(errors["codec"], errors["fourier"], atol=1e-5, rtol=1e-2)
    assert errors["fourier"].mean() < errors["linear"].mean() < 0.02
    index = torch.arange(256)
    exact = interpolate(u, codec.points(index), (True,), 0.25)
    torch.testing.assert_close(exact, u.mT, atol=1e-5, rtol=1e-5)


def test_every_parameter_has_a_gradient_and_losses_are_per_sample():
    u = smooth(5, 2, (16, 8))
    codec = awake(start(u, 3, 4)[1])
    loss = codec_loss(codec, batch_of(codec, u))
    assert loss.shape == (5,)
    loss.mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in codec.parameters())
    batch = batch_of(codec, u)
    part = codec_loss(codec, {**batch, "u": u[:2], "noise": batch["noise"][:2]})
    torch.testing.assert_close(part, loss[:2])


def test_measured_weight_equals_the_closed_form_at_the_start():
    u = smooth(8, 2, (32,))
    patch, codec = start(u, 4)
    codec.weight.fill_(1.0)
    measure_weight(codec, 1e-3 * u + patch.mean[:, None])
    torch.testing.assert_close(codec.weight, patch.weight, rtol=1e-2, atol=1e-6)


def test_rebuilds_from_config_and_weights():
    u = smooth(4, 2, (16, 8)).float()
    codec = awake(start(u, 3, 4)[1])
    again = build_codec(json.loads(json.dumps(codec.config)))
    again.load_state_dict(codec.state_dict())
    z = codec.encode(u)
    points = torch.rand(7, 2)
    assert torch.equal(again.encode(u), z) and again.tokens == codec.tokens
    assert torch.equal(again.decode_at(z, points), codec.decode_at(z, points))


def test_a_training_step_is_one_graph():
    u = smooth(2, 2, (16, 8))
    codec = awake(start(u, 3, 4)[1])
    batch = batch_of(codec, u)
    whole = torch.compile(codec, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(codec_loss(whole, batch), codec_loss(codec, batch))
