"""The codec interface and the patch codec: numbers that a wrong projection would change."""

import json
import math

import numpy as np
import pytest
import torch
from factual import facts, smooth
from torch.utils._python_dispatch import TorchDispatchMode

from ups.models.any_point import interpolate
from ups.models.codec import (
    build_codec,
    component_errors,
    fit_patch,
    from_patches,
    patch_sizes,
    to_patches,
    truncate,
)
from ups.models.precision import products
from ups.relative_error import mean_relative_error

GRIDS = {1: ((32,), 4), 2: ((16, 8), (4, 2)), 3: ((4, 8, 4), 2)}


def fit(u, val=None, patch=4, batch=8, boundary="periodic", given=(), **kw):
    val = u if val is None else val
    grid = tuple(u.shape[2:])
    about = facts("demo", grid, tuple(f"c{i}" for i in range(u.shape[1])),
                  boundary=(boundary,) * len(grid), inputs=given)
    sizes = patch_sizes(grid, (patch,) * len(grid)) if isinstance(patch, int) else patch
    return fit_patch(lambda: u.split(batch), lambda: val.split(batch), facts=about.plain(),
                     patch=sizes, **kw)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_patches_invert(axes):
    grid, patch = GRIDS[axes]
    u = smooth(2, 2, grid)
    codec = fit(u, patch=patch, components="all")
    x = to_patches(u, codec.patch)
    assert x.shape == (2, math.prod(codec.tokens), 2 * math.prod(codec.patch))
    assert torch.equal(from_patches(x, codec.patch, codec.tokens), u)
    first = u[(slice(None), slice(None), *(slice(0, p) for p in codec.patch))].flatten(1)
    assert torch.equal(x[:, 0], first)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_all_components_invert_exactly(axes):
    grid, patch = GRIDS[axes]
    u = smooth(24, 2, grid)
    codec = fit(u, patch=patch, components="all")
    z = codec.encode(u)
    assert z.shape == (24, math.prod(codec.tokens), codec.width)
    assert mean_relative_error(codec.decode(z), u).max() < 1e-12
    assert component_errors(codec, [u])[-1] == 0


def test_normalisation_and_unit_variance():
    u = smooth(64, 2, (32,))
    codec = fit(u, components="all")
    torch.testing.assert_close(codec.mean, u.mean((0, 2)))
    torch.testing.assert_close(codec.std, u.std((0, 2), correction=0))
    z = codec.encode(u).flatten(0, 1)
    torch.testing.assert_close(z.mean(0), torch.zeros(8, dtype=z.dtype), atol=1e-10, rtol=0)
    torch.testing.assert_close(z.mT @ z / len(z), torch.eye(8, dtype=z.dtype), atol=1e-8, rtol=0)
    assert abs(codec.weight.mean() - 1) < 1e-12


def test_weight_is_the_physical_norm():
    codec = fit(smooth(32, 2, (32,)), components=5)
    z = torch.zeros(1, 8, 5, dtype=torch.float64)
    size = []
    for d in range(5):
        bump = z.clone()
        bump[0, 3, d] = 1
        step = (codec.decode(bump) - codec.decode(z)) / codec.std[:, None]
        size.append(step.square().sum())
    size = torch.stack(size)
    torch.testing.assert_close(size / size.mean(), codec.weight)


def test_components_are_those_of_the_singular_value_decomposition():
    u = smooth(40, 1, (32,))
    codec = fit(u, components=3)
    x = ((u - u.mean()) / u.std(correction=0)).reshape(-1, 4).numpy()
    _, s, v = np.linalg.svd(x - x.mean(0), full_matrices=False)
    np.testing.assert_allclose(codec.scale.numpy(), s[:3] / math.sqrt(len(x)), rtol=1e-9)
    overlap = np.abs(v[:3] @ codec.basis.numpy())
    np.testing.assert_allclose(overlap, np.eye(3), atol=1e-8)


@pytest.mark.parametrize("channels", [1, 2])
def test_auto_keeps_the_fewest_that_reach_the_error(channels):
    u, val = smooth(40, channels, (32,)), smooth(10, channels, (32,), seed=1)
    codec = fit(u, val, patch=8, error=2e-2)
    full = fit(u, val, patch=8, components="all")
    width = codec.width
    assert 1 < width < 8 * channels
    measured = [mean_relative_error(c.decode(c.encode(val)), val).mean()
                for c in (truncate(full, w) for w in (width - 1, width))]
    assert measured[0] > 2e-2 >= measured[1]
    errors = component_errors(full, [val])[width - 1:width + 1]
    torch.testing.assert_close(errors, torch.stack(measured))


def test_error_leaves_out_a_channel_that_is_zero():
    u = smooth(6, 2, (16,))
    u[::2, 1] = 0
    p = 1.1 * u
    torch.testing.assert_close(mean_relative_error(p, u), torch.full((6,), 0.1, dtype=u.dtype))
    codec = fit(u, components="all")
    assert component_errors(codec, [u]).isfinite().all()


def test_constant_channel_and_dead_components_do_not_divide_by_zero():
    u = smooth(8, 2, (16,))
    u[:, 1] = 3.0
    codec = fit(u, components="all")
    z = codec.encode(u)
    assert z.isfinite().all() and z.abs().max() < 50
    assert mean_relative_error(codec.decode(z), u).max() < 1e-9


def test_float32_codec_is_exact_to_rounding_and_rebuilds():
    u = smooth(16, 2, (16, 8)).float()
    codec = fit(u, patch=4, components="all")
    z = codec.encode(u)
    assert z.dtype == torch.float32
    assert mean_relative_error(codec.decode(z), u).max() < 2e-6
    again = build_codec(json.loads(json.dumps(codec.config)))
    again.load_state_dict(codec.state_dict())
    assert torch.equal(again.encode(u), z) and again.tokens == codec.tokens


class Levels(TorchDispatchMode):
    """Which precision each matrix product was computed in."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in str(function):
            self.seen = [*getattr(self, "seen", []), torch.get_float32_matmul_precision()]
        return function(*args, **kwargs or {})


def test_products_of_the_projection_are_never_rounded():
    u = smooth(24, 1, (32,), dtype=torch.float32)
    codec = fit(u, components=2)
    with products("high"), Levels() as levels:
        codec.decode(codec.encode(u))
        torch.eye(3) @ torch.eye(3)
    assert levels.seen == ["highest", "highest", "high"]
    with pytest.raises(ZeroDivisionError), products("high"):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"


def test_bfloat16_autocast_leaves_the_projection_alone():
    u = smooth(4, 1, (32,)).float()
    codec = fit(u, components=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = codec.encode(u)
    assert torch.equal(z, codec.encode(u))


@pytest.mark.parametrize("grid, patch, sizes", [
    ((32,), 4, (4,)), ((32, 48), 5, (4, 6)), ((129, 256), 4, (3, 4)), ((7,), 4, (7,)),
    ((101,), 4, (1,)), ((6, 1, 10), 4, (3, 1, 5)), ((16,), 100, (16,))])
def test_patches_fit_every_axis(grid, patch, sizes):
    assert patch_sizes(grid, (patch,) * len(grid)) == sizes


def test_inputs_become_tokens_without_loss():
    v = 5.0 + 3.0 * smooth(6, 2, (16, 8)).float()
    v[:, 1] = 2.0  # constant
    u = smooth(8, 1, (16, 8)).float()
    codec = fit(u, patch=(4, 2), components=3, given=("a", "mask"), inputs=lambda: v.split(4))
    tokens = codec.encode_inputs(v)
    assert tokens.shape == (6, 16, 2 * 8) and codec.inputs == 16
    torch.testing.assert_close(tokens[..., :8].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens[..., :8].std(correction=0), torch.tensor(1.0))
    assert not tokens[..., 8:].any()
    torch.testing.assert_close(codec.decode_inputs(tokens), v, rtol=1e-6, atol=1e-6)
    again = build_codec(json.loads(json.dumps(codec.config)))
    again.load_state_dict(codec.state_dict())
    assert torch.equal(again.encode_inputs(v), tokens)


def test_patches_that_fit_nowhere_are_refused():
    with pytest.raises(ValueError, match="no patch near 8 .* 101 points; patches of 1, 101 do"):
        patch_sizes((32, 101), (8, 8))
    with pytest.raises(ValueError, match="1 to 4"):
        fit(smooth(2, 1, (32,)), patch=4, components=9)
    with pytest.raises(ValueError, match="val split is empty"):
        fit(smooth(2, 1, (32,)), val=torch.zeros(0, 1, 32))
    with pytest.raises(ValueError, match="all fields are constant: there is nothing to learn"):
        fit(torch.full((2, 1, 32), 3.0))


def centres(grid, offset):
    axes = [(torch.arange(n, dtype=torch.float64) + offset) / n for n in grid]
    return torch.cartesian_prod(*axes).reshape(-1, len(grid))


@pytest.mark.parametrize("boundary", ["periodic", "closed"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_decode_at_grid_points_is_decode(axes, boundary):
    grid, patch = GRIDS[axes]
    u = smooth(6, 2, grid)
    for offset in (0.5, 0.125):
        codec = fit(u, patch=patch, components=4, boundary=boundary, offset=offset)
        z = codec.encode(u)
        values = codec.decode_at(z, centres(grid, offset))
        torch.testing.assert_close(values, codec.decode(z).flatten(2).mT, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("n", [16, 15])
def test_fourier_interpolation_is_exact_for_band_limited_fields(n):
    def wave(p):  # highest wave number 7 < 15 / 2, below the Nyquist one of 16
        return 1 + torch.sin(6 * math.pi * p[:, 0] + 0.2) * torch.cos(14 * math.pi * p[:, 1])

    u = wave(centres((n, n), 0.125)).view(1, 1, n, n)
    points = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    exact = wave(points)
    torch.testing.assert_close(interpolate(u, points, (True, True), 0.125)[0, :, 0], exact)
    wrong = interpolate(u, points, (True, True), 0.5)[0, :, 0]  # the offset matters
    linear = interpolate(u, points, (True, True), 0.125, fourier=False)[0, :, 0]
    assert (wrong - exact).abs().max() > 0.1 and (linear - exact).abs().max() > 0.1


def test_each_axis_is_interpolated_by_its_own_boundary():
    """Periodic along x, by a series; closed along y, along straight lines."""
    def field(p):
        return torch.sin(6 * math.pi * p[:, 0] + 0.2) * (p[:, 1] - 0.3)

    u = field(centres((16, 8), 0.5)).view(1, 1, 16, 8)
    points = torch.rand(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    points[:, 1] = 0.1 + 0.8 * points[:, 1]
    values = interpolate(u, points, (True, False))[0, :, 0]
    torch.testing.assert_close(values, field(points), rtol=0, atol=1e-12)


def test_linear_interpolation_on_a_closed_axis():
    u = torch.tensor([0.0, 1.0, 3.0, 3.0], dtype=torch.float64).view(1, 1, 4)
    points = torch.tensor([[0.0], [0.125], [0.25], [0.5], [1.0]])
    values = interpolate(u, points, (False,))[0, :, 0]
    torch.testing.assert_close(values, torch.tensor([0, 0, 0.5, 2, 3], dtype=torch.float64))
