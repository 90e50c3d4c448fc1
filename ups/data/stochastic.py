"""Kolmogorov flow with stochastic forcing, and its true distribution.

    python -m ups.data make ns2d --forcing stochastic --truth 512

writes ns2d_stochastic.h5 and beside it ns2d_stochastic.truth: for the first frames of some test
trajectories, that many continuations by the solver, each with noise of its own. They go on from the
full state, of which the file keeps half the wave numbers. `truncation` is the spread that the lost
half alone adds: of continuations with the same noise whose small scales are those of other states.
"""

import collections
import itertools
import json

import numpy as np
import torch
from tqdm import tqdm

from ups.data.find import open_fields
from ups.data.solvers import ns2d
from ups.data.write import new_file

INTERVAL = 0.5   # time between frames
LEADS = (1, 2, 4, 8, 16)  # of the truth
STATES = 16      # of the test split that it goes on from
COPIES = 16      # continuations of each whose small scales are replaced
FACTS = dict(
    name="ns2d_stochastic", channels="u v", axes="y x", boundary="periodic periodic", dt=INTERVAL,
    equation="incompressible Navier-Stokes, noise on cos and sin of 4 x and 4 y",
    domain=((0.0, 2 * np.pi),) * 2, conserved="u v", shifts="y x", mirrors="x: u; y: v")


def solve(generator, n, grid=64, frames=33, nu=1e-3, spin_up=60):
    """Velocities (n, frames, 2, grid, grid), after `spin_up` frames: three times 1 / drag."""
    w, generator = begin(generator, n, grid, nu, spin_up)
    return _kept(itertools.chain([w], ns2d.states(w, frames - 1, INTERVAL, generator, nu)), grid)


def begin(generator, n, grid, nu, spin_up):
    """Developed flows, the full vorticity (n, 2 grid, grid + 1), and a generator on the CPU."""
    device, generator = generator.device, torch.Generator().manual_seed(generator.initial_seed())
    u = ns2d.initial(n, 2 * grid, generator).to(device)
    w = ns2d.Modes(2 * grid, u).vorticity(u)
    states = ns2d.states(w, spin_up, INTERVAL, generator, nu)
    return collections.deque(states, maxlen=1)[0], generator


def write_truth(path, data, job, generator):
    """Continuations (states, leads, members, C, *grid) of test trajectories of the file `data`.

    `job` holds the settings of that file, and `generator(chunk)` what its samples are drawn with.
    """
    grid, nu, members = job["grid"], job["nu"], job["truth"]
    chosen = open_fields("ns2d_stochastic", data).split("test")[:STATES].tolist()
    leads, full = [k for k in LEADS if k < job["frames"]], {}
    for chunk in {n // job["chunk"] for n in chosen}:
        w, _ = begin(generator(chunk), job["chunk"], grid, nu, job["spin_up"])
        full |= {n: w[n % job["chunk"]] for n in chosen if n // job["chunk"] == chunk}
    starts = torch.stack([full[n] for n in chosen])

    def spread_of(w, generator, same=False):
        states = ns2d.states(w, leads[-1], INTERVAL, generator, nu, same=same)
        u = _kept((w for k, w in enumerate(states, start=1) if k in leads), grid)  # (M, leads, ..)
        return u.swapaxes(0, 1), u.var(0).mean((1, 2, 3)).numpy()

    with new_file(path) as f:
        f.attrs["ups"] = json.dumps(job, sort_keys=True)
        f["trajectory"], f["lead"] = chosen, leads
        f.create_dataset("u", (len(chosen), len(leads), members, 2, grid, grid), "f4")
        spread, added = np.zeros((2, len(chosen), len(leads)))
        for i, n in enumerate(tqdm(chosen, unit=" states", desc="truth")):
            draws = torch.Generator().manual_seed(generator(f"truth {n}").initial_seed())
            f["u"][i], spread[i] = spread_of(starts[i].repeat(members, 1, 1), draws)
            others = starts[(i + torch.arange(COPIES)) % len(starts)]
            _, added[i] = spread_of(_with_small_scales(starts[i], others, grid), draws, same=True)
        f["truncation"] = np.sqrt(added.mean(0) / spread.mean(0))
        print(f"spread that the truncation adds at leads {leads}, as a share of the true one: "
              f"{f['truncation'][:].round(3)}")


def _kept(states, grid):
    """Velocities (n, T, 2, grid, grid) of full states (n, N, N/2+1), on the CPU."""
    return torch.stack([ns2d.truncated(w, grid).cpu() for w in states], 1)


def _with_small_scales(w, others, n):
    """The waves of w that a grid of n points keeps, with the smaller scales of `others`."""
    waves = torch.fft.fftfreq(w.shape[0], 1 / w.shape[0]).abs()
    kept = (waves[:, None] < n // 2) & (waves[None, : w.shape[1]] < n // 2)
    return torch.where(kept.to(w.device), w, others)
