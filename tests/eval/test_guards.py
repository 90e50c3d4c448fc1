"""Guards hold to rounding what they promise, and nothing else changes."""

import math
import types

import pytest
import torch

from ups.config import UsageError
from ups.data.fields import Spec
from ups.data.solvers import ns2d
from ups.data.tasks import TASKS
from ups.eval.guards import Guard, check_guards
from ups.models.codec import fit_patch


def task_of(name, grid, domain=None, boundary="periodic", components="all", u=None):
    """A task with random fields u, and a patch codec fitted to them, as a run would have it."""
    channels = TASKS[name].channels
    if u is None:
        u = torch.randn(6, len(channels), *grid, generator=torch.Generator().manual_seed(0)) + 0.3
    codec = fit_patch(lambda: [u], lambda: [u], task=name, grid=grid, channels=channels,
                      boundary=boundary, patch=4, components=components)
    domain = domain or ((0.0, 1.0),) * len(grid)
    spec = Spec(name, grid, channels, boundary, domain, 0.1, 5, ())
    held = [channels.index(c) for c in TASKS[name].conserved]
    return types.SimpleNamespace(name=name, codec=codec, conserved=held,
                                 fields=types.SimpleNamespace(spec=spec)), u


def spectral_divergence(v, lengths):
    """Sum of d v_a / d x_a over the axes a, for v (B, axes, *grid), by derivatives one by one."""
    total = 0
    for axis, length in enumerate(lengths):
        n = v.shape[2 + axis]
        k = 2j * math.pi * torch.fft.fftfreq(n, length / n, dtype=torch.float64)
        k[n // 2] = 0
        view = [-1 if a == axis else 1 for a in range(len(lengths))]
        wave = torch.fft.fft(v[:, axis], dim=1 + axis) * k.view(view)
        total = total + torch.fft.ifft(wave, dim=1 + axis).real
    return total


def test_conserve_holds_the_mean_of_the_first_frame_alone():
    task, u = task_of("cns2d", (8, 8))
    u0, later = u[:2].double(), u[2:].double()  # two rows of each trajectory
    got = Guard("conserve", task, u0).fields(later)
    held = u0[:, 0].mean((1, 2)).repeat_interleave(2)
    assert torch.allclose(got[:, 0].mean((1, 2)), held, atol=1e-15)
    shift = got[:, 0] - later[:, 0]
    assert torch.allclose(shift, shift[:, :1, :1].expand_as(shift), atol=1e-15)
    assert torch.equal(got[:, 1:], later[:, 1:])


def test_positive_clamps_and_with_conserve_keeps_the_mean_too():
    task, u = task_of("cns2d", (8, 8))
    u0, later = u[:4].double().abs(), u[2:].double()
    got = Guard(["positive"], task, u0).fields(later)
    assert torch.equal(got[:, :2], later[:, :2].clamp(min=0)) and later[:, :2].min() < -1
    assert torch.equal(got[:, 2:], later[:, 2:])  # a velocity may have either sign
    guard = Guard("positive, conserve", task, u0)
    got = guard.fields(later)
    assert got[:, :2].min() == 0
    assert torch.allclose(got[:, 0].mean((1, 2)), u0[:, 0].mean((1, 2)), rtol=1e-14)
    assert torch.allclose(guard.fields(got), got, atol=1e-14)


def test_divfree_is_the_helmholtz_projection_in_stored_axis_order():
    lengths = (2.0, 3.0)  # (y, x): neither the grid nor the domain is square
    task, u = task_of("ns2d", (8, 12), domain=((-1.0, 1.0), (0.0, 3.0)))
    u = u.double()
    got = Guard("divfree", task, u).fields(u)
    divergence = spectral_divergence(got.flip(1), lengths)  # channels (Vx, Vy), axes (y, x)
    assert divergence.abs().max() < 1e-12 < 1 < spectral_divergence(u.flip(1), lengths).abs().max()
    y = torch.arange(8) / 8 * 2 * math.pi
    x = torch.arange(12)[None] / 12 * 2 * math.pi
    phi = torch.stack([2 / 3 * torch.cos(x) * torch.sin(y)[:, None],
                       torch.sin(x) * torch.cos(y)[:, None]])  # grad of sin x sin y, times 1/pi
    assert Guard("divfree", task, u).fields(phi[None].double()).abs().max() < 1e-6  # no gradient
    assert torch.allclose(Guard("divfree", task, u).fields(got), got, atol=1e-14)
    assert torch.allclose(got.mean((2, 3)), u.mean((2, 3)), atol=1e-15)


def test_the_solvers_own_flow_passes_untouched():
    w = torch.fft.rfft2(torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(1)).double())
    modes = ns2d.Modes(16, torch.zeros((), dtype=torch.float64))
    v = modes.velocity(w)
    task, _ = task_of("ns2d", (16, 16), domain=((0.0, 2 * math.pi),) * 2)
    assert torch.allclose(Guard("divfree", task, v).fields(v), v, atol=1e-13) and v.std() > 0.1


@pytest.mark.parametrize("components", ["all", 3])
def test_latents_are_mended_exactly_or_as_far_as_the_codec_can_say(components):
    task, u = task_of("burgers1d", (16,), components=components)
    codec = task.codec.double()
    u0, z = u[:2].double(), codec.encode(u[2:].double())
    guard = Guard("conserve", task, u0)
    padded = torch.nn.functional.pad(z, (0, 2), value=7.0)
    held = u0.mean(2).repeat_interleave(2, 0)
    new = guard(padded)
    assert torch.equal(new[..., -2:], padded[..., -2:])  # another task's channels
    out = codec.decode(new[..., :-2])
    assert torch.allclose(guard.fields(out).mean(2), held, atol=1e-14)
    if components == "all":
        assert torch.allclose(out, guard.fields(codec.decode(z)), atol=1e-12)
        assert torch.allclose(out.mean(2), held, atol=1e-12)
    before, after = ((codec.decode(x).mean(2) - held).abs().max() for x in (z, new[..., :-2]))
    assert after < 0.3 * before


def test_what_needs_no_mending_and_no_guard_at_all_leave_the_latents_bit_for_bit():
    task, u = task_of("reacdiff1d", (16,), u=torch.rand(6, 1, 16) + 5)
    z = task.codec.encode(u)
    assert torch.equal(Guard("positive", task, u)(z), z)
    assert Guard((), task, u)(z) is z
    doubled = Guard("positive", task, u).after(lambda z, dt, task=0: z * dt)
    assert torch.equal(doubled(z, 1.0, task=0), z)


@pytest.mark.parametrize("name, guards, words", [
    ("burgers1d", "conserv", "conserve, positive, divfree"),
    ("burgers1d", "conserve,positive", "either sign"),
    ("reacdiff1d", "conserve", "keeps the mean of no channel"),
    ("cns2d", "divfree", "no velocity without divergence"),
    ("ns2d", "divfree", "closed"),
])
def test_guards_that_make_no_sense_are_refused_in_one_sentence(name, guards, words):
    spec = types.SimpleNamespace(boundary=TASKS[name].boundary)
    task = types.SimpleNamespace(name=name, conserved=TASKS[name].conserved,
                                 fields=types.SimpleNamespace(spec=spec))
    with pytest.raises(UsageError, match=words):
        check_guards(guards, task)


def test_of_several_tasks_each_has_the_guards_that_suit_it():
    tasks = [types.SimpleNamespace(
        name=name, conserved=TASKS[name].conserved,
        fields=types.SimpleNamespace(spec=types.SimpleNamespace(boundary="periodic")))
        for name in ("ns2d", "burgers1d", "reacdiff1d")]
    assert check_guards("conserve,divfree", *tasks) == [("divfree",), ("conserve",), ()]
    with pytest.raises(UsageError, match="no guard conserv;"):
        check_guards("conserv", *tasks)
