"""Moved, mirrored and added solutions are solutions: solve the moved start, move the solved one."""

import dataclasses
import itertools
import types

import pytest
import torch

from ups.data.augment import moved, symmetries
from ups.data.pdebench import TASKS
from ups.data.solvers import SOLVERS
from ups.latents import TaskLatents

GRID = 32


def fields_of(name, stride_x=1, **changes):
    """What `moved` asks of Fields; our own ns2d is periodic, and its force depends on y."""
    if name == "ns2d":
        changes = {"boundary": ("periodic",) * 2, "shifts": ("x",)} | changes
    facts = dataclasses.replace(TASKS[name].facts, **changes)
    facts = dataclasses.replace(facts, shifts=facts.shifts or ())
    return types.SimpleNamespace(facts=facts, stride_x=stride_x)


@pytest.mark.parametrize("name", [name for name in SOLVERS if any(symmetries(fields_of(name)))])
def test_moved_solutions_are_solutions(name):
    fields, solver = fields_of(name), SOLVERS[name]
    mirrors = len(fields.facts.mirrors)
    rows = list(itertools.product((0.2, 0.7), repeat=mirrors))  # none .. all
    u0 = solver.initial(1, GRID, torch.Generator().manual_seed(0), torch.float64)
    u0 = u0.repeat(len(rows), *[1] * (u0.ndim - 1))
    shares = torch.tensor([0.4, 0.25, 0.75]).repeat(len(rows), 1)
    mirror = torch.tensor(rows).view(len(rows), -1)
    added = torch.tensor([0, 0, 0.3, 0.9]).repeat(len(rows), 1)  # of linear tasks alone
    if fields.facts.inputs:  # a and u move together
        u = solver.solve(u0)[:, None]
        start = moved(u0[:, None], fields, shares, mirror, channels=fields.facts.inputs)[:, 0]
        expected, got = moved(u, fields, shares, mirror, added), solver.solve(start)[:, None]
    else:
        u = solver.solve(u0, 0.25, 3)
        expected = moved(u, fields, shares, mirror, added)
        start = expected[:, 0]
        got = solver.solve(start, 0.25, 3)
    error = (got - expected).flatten(1).norm(dim=1) / u.flatten(1).norm(dim=1)
    assert error.max() < 1e-9, error
    assert len({tuple(row.flatten().tolist()) for row in start}) == len(rows)
    assert not torch.allclose(start, u0, atol=0.05)


def test_inputs_move_along_and_may_change_sign():
    """y is closed: no shift; of the velocity, the input, the component across x turns."""
    fields = fields_of("diffreact2d", boundary=("closed", "periodic"), shifts=("x",),
                       channels=("u",), inputs=("Vx", "c"), mirrors=(("x", ("Vx",)),), linear=True)
    v = torch.arange(2.0 * 2 * 3 * 4).view(2, 1, 2, 3, 4)  # (B, 1, E, y, x)
    shift, mirror = torch.tensor([[0, 0.4, 0.25]] * 2), torch.tensor([[0.3], [0.8]])
    got = moved(v, fields, shift, mirror, channels=fields.facts.inputs)
    signs = torch.tensor([-1.0, 1.0])[:, None, None]
    assert torch.equal(got, torch.stack([v[0].roll(1, -1).flip(-1) * signs, v[1].roll(1, -1)]))
    u = v[:, :, 1:]
    added = torch.tensor([[0, 0, 0.25, 0.9]] * 2)
    got = moved(u, fields, shift, mirror, added)  # nothing is added
    assert torch.equal(got, torch.stack([u[0].roll(1, -1).flip(-1), u[1].roll(1, -1)]))


def test_sums_are_what_they_say():
    u = torch.arange(12.0).view(3, 1, 1, 4)
    shift, added = torch.zeros(3, 3), torch.tensor([[0, 0, 0.25, 0.49], [0, 0, 0.25, 0.5],
                                                    [0, 0, 0.5, 0.875]])
    shift[2, 2] = 0.25
    expected = torch.stack([u[0], u[1] - u[1].roll(1, -1),
                            u[2].roll(1, -1) + 0.5 * u[2].roll(3, -1)])
    assert torch.equal(moved(u, fields_of("advection1d"), shift, None, added), expected)
    fields = fields_of("advection1d", boundary=("closed",), shifts=())
    closed = moved(u, fields, shift, None, added)
    assert torch.equal(closed, u)
    nonlinear = moved(u, fields_of("burgers1d"), shift, None, added)
    assert torch.equal(nonlinear, moved(u, fields_of("burgers1d"), shift))


@pytest.mark.parametrize("name, whole, thinned", [
    ("diffreact2d", ["x", "y"], []), ("burgers1d", ["x"], ["x"]), ("advection1d", [""], [""])])
def test_thinned_closed_axes_are_not_mirrored(name, whole, thinned):
    """The mirror of every second point is not every second point of the mirror image."""
    assert list(symmetries(fields_of(name))[1]) == whole
    assert list(symmetries(fields_of(name, stride_x=2))[1]) == thinned


@pytest.mark.parametrize("kind, same", [("patch", False), ("grid", True)])
def test_latents_of_a_learned_codec_are_neither_mirrored_nor_added(kind, same):
    codec = types.SimpleNamespace(config={"kind": kind}, width=1,
                                  decode=lambda z: z.mT, encode=lambda u: u.mT, grid=(16,))
    fields = fields_of("advection1d")
    task = TaskLatents(fields.facts, codec, "", fields, width=1)
    z, added = torch.randn(3, 2, 16, 1), torch.tensor([0.0] * 3 + [1.0] * 3 + [0.7] * 4)
    for move in (torch.zeros(10), added):
        assert torch.equal(task.augment(z, move.repeat(3, 1))[0], z) == same
