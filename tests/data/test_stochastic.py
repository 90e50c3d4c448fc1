"""Stochastic forcing: what the noise feeds in, what truncation keeps, where the truth begins."""

import h5py
import pytest
import torch

from ups.config import UsageError
from ups.data.find import open_fields
from ups.data.make import make
from ups.data.solvers import ns2d


def test_the_noise_feeds_in_twice_the_time_of_enstrophy():
    """Transport conserves it and each of the four waves has a mean square of a half."""
    generator = torch.Generator().manual_seed(0)
    states = ns2d.states(torch.zeros(200, 32, 17, dtype=torch.complex128), 2, 0.25,
                         generator, nu=0.0, drag=0.0)
    _, w = states
    enstrophy = torch.fft.irfft2(w).square().mean((1, 2))
    assert abs(enstrophy.mean() - 1.0) < 3 * enstrophy.std() / 200**0.5


def test_truncation_keeps_what_the_coarse_grid_holds():
    fine, coarse = (ns2d.initial(2, n, torch.Generator().manual_seed(1), torch.float64)
                    for n in (64, 32))
    w = ns2d.Modes(64, fine).vorticity(fine)
    assert (ns2d.truncated(w, 32) - coarse).abs().max() < 1e-12


def test_the_truth_goes_on_from_test_states_and_lies_beside_the_file(tmp_path):
    sizes = {"samples": 20, "grid": 16, "frames": 3, "chunk": 20, "spin_up": 4,
             "forcing": "stochastic"}
    path, truth = make("ns2d", out=tmp_path, truth=4, **sizes)
    fields = open_fields("ns2d_stochastic", tmp_path)
    assert fields.facts.shifts == ("y", "x") and fields.facts.dt == 0.5
    with h5py.File(truth) as f:
        chosen = f["trajectory"][:].tolist()
        assert chosen == fields.split("test").tolist() and f["lead"][:].tolist() == [1, 2]
        u, start = torch.from_numpy(f["u"][:]), fields.read(chosen, slice(1))
        far = (u[:, 0] - start.roll(1, 0)).square().mean()
        assert u.shape == (2, 2, 4, 2, 16, 16) and (u[:, 0] - start).square().mean() < far
        spread = u.std(2).square().mean((0, 2, 3, 4))
        assert 0 < spread[0] < spread[1] and 0 < f["truncation"][0] < 1
    with pytest.raises(UsageError, match="other settings"):
        make("ns2d", out=tmp_path, forcing="stochastic", samples=21)
