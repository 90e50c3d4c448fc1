"""Kolmogorov flow with stochastic forcing, and its true distribution.

    python -m ups.data make ns2d --forcing stochastic --truth 512

writes ns2d_stochastic.h5 and beside it ns2d_stochastic.truth: for the first frames of some test
trajectories, that many continuations by the solver, each with noise of its own. They go on from the
full state, of which the file keeps half the wave numbers. `truncation` is the spread that the lost
half alone adds: of continuations with the same noise whose small scales are those of other states.
"""

import collections
import hashlib
import json
from pathlib import Path

import h5py
import numpy as np
import torch
from tqdm import tqdm

from ups.config import UsageError
from ups.data.find import open_fields
from ups.data.solvers import ns2d
from ups.data.write import new_file, write_fields

DEFAULTS = {"samples": 256, "grid": 64, "frames": 33, "seed": 0, "nu": 1e-3, "truth": 0}
INTERVAL = 0.5   # time between frames
SPIN_UP = 60     # frames before the first that is kept: three times 1 / drag
CHUNK = 1000     # trajectories that are solved at a time
LEADS = (1, 2, 4, 8, 16)  # of the truth
STATES = 16      # of the test split that it goes on from
COPIES = 16      # continuations of each whose small scales are replaced


def make_stochastic(out, device, **changes):
    """Write the trajectories, and the truth where it is asked for; return the paths."""
    if unknown := changes.keys() - DEFAULTS.keys():
        raise UsageError(f"stochastic ns2d has no setting {min(unknown)}; it has "
                         f"{', '.join(DEFAULTS)}.")
    job = DEFAULTS | changes
    path = Path(out) / "ns2d_stochastic.h5"
    truth = path.with_suffix(".truth")
    done = [one for one in (path, truth) if one.exists()]
    for one in done:
        with h5py.File(one) as f:
            there = json.loads(f.attrs.get("ups", "{}"))
        if {**there, "truth": 0} != {**job, "truth": 0} or one == truth and there != job:
            raise UsageError(f"{one} is there with other settings ({there}); remove it, or choose "
                             "another --out.")
        print(f"{one} is complete.")
    if path not in done:
        _write(path, job, device)
    if job["truth"] and truth not in done:
        _write_truth(truth, open_fields("ns2d_stochastic", path).split("test"), job, device)
    return [path, truth] if job["truth"] else [path]


def begin(job, chunk, device):
    """Developed flows: the full vorticity (n, N, N/2+1) of a chunk, and its generator."""
    generator = _generator(job["seed"], chunk)
    count, grid = min(CHUNK, job["samples"] - chunk * CHUNK), 2 * job["grid"]
    u = ns2d.initial(count, grid, generator).to(device)
    states = ns2d.states(ns2d.Modes(grid, u).vorticity(u), SPIN_UP, INTERVAL,
                         _draw(generator, count), job["nu"])
    (w,) = collections.deque(states, maxlen=1)
    return w, generator


def trajectories(job, device):
    """Yield u (T, C, *grid), one by one."""
    with tqdm(total=job["samples"], unit=" samples", desc="ns2d_stochastic") as bar:
        for chunk in range(-(-job["samples"] // CHUNK)):
            w, generator = begin(job, chunk, device)
            frames = [ns2d.truncated(w, job["grid"]).cpu()]
            draw = _draw(generator, len(w))
            for later in ns2d.states(w, job["frames"] - 1, INTERVAL, draw, job["nu"]):
                frames.append(ns2d.truncated(later, job["grid"]).cpu())
            bar.update(len(w))
            yield from torch.stack(frames, 1).numpy()


@torch.no_grad()
def _write(path, job, device):
    write_fields(
        path, trajectories(job, device), dt=INTERVAL, channels="u v", axes="y x",
        boundary="periodic periodic", domain=((0.0, 2 * np.pi),) * 2, name="ns2d_stochastic",
        equation="incompressible Navier-Stokes, noise on cos and sin of 4 x and 4 y",
        vectors=(("v", "u"),), solenoidal=True, conserved="u v", shifts="y x",
        mirrors="x: u; y: v", made=job)


@torch.no_grad()
def _write_truth(path, test, job, device):
    """Continuations (states, leads, members, C, *grid) from full states of test trajectories."""
    chosen, leads = test[:STATES].tolist(), [k for k in LEADS if k < job["frames"]]
    full = {}
    for chunk in {n // CHUNK for n in chosen}:
        w, _ = begin(job, chunk, device)
        full |= {n: w[n % CHUNK] for n in chosen if n // CHUNK == chunk}
    starts = torch.stack([full[n] for n in chosen])
    shape = len(leads), job["truth"], 2, job["grid"], job["grid"]
    with new_file(path) as f:
        f.attrs["ups"] = json.dumps(job, sort_keys=True)
        f["trajectory"], f["lead"] = chosen, leads
        f.create_dataset("u", (len(chosen), *shape), "f4")
        spread, added = np.zeros((2, len(chosen), len(leads)))
        for i, n in enumerate(tqdm(chosen, unit=" states", desc="truth")):
            generator = _generator(job["seed"], f"truth {n}")
            u = _continue(starts[i].expand(job["truth"], -1, -1), leads, job,
                          _draw(generator, job["truth"]))
            f["u"][i], spread[i] = u, u.var(1, ddof=1).mean((1, 2, 3))
            other = _small_scales(starts[i], starts[(i + torch.arange(COPIES)) % len(starts)],
                                  job["grid"])
            same = _draw(generator, 1)
            u = _continue(other, leads, job, lambda steps, same=same: same(steps).expand(
                -1, COPIES, -1))
            added[i] = u.var(1, ddof=1).mean((1, 2, 3))
        f["truncation"] = np.sqrt(added.mean(0) / spread.mean(0))
        print("spread that the truncation adds, as a share of the true one: " + ", ".join(
            f"{share:.2g} at lead {k}" for k, share in zip(leads, f["truncation"], strict=True)))


def _continue(w, leads, job, draw):
    """Kept fields (leads, M, C, *grid) that follow the full states w (M, N, N/2+1)."""
    states = ns2d.states(w.clone(), leads[-1], INTERVAL, draw, job["nu"])
    return np.stack([ns2d.truncated(w, job["grid"]).cpu().numpy()
                     for k, w in enumerate(states, start=1) if k in leads])


def _small_scales(w, others, n):
    """The waves of w that a grid of n points keeps, with the smaller scales of `others`."""
    waves = torch.fft.fftfreq(w.shape[0], 1 / w.shape[0]).abs()
    kept = (waves[:, None] < n // 2) & (waves[None, : w.shape[1]] < n // 2)
    return torch.where(kept.to(w.device), w, others)


def _draw(generator, rows):
    return lambda steps: torch.randn(steps, rows, 4, generator=generator)


def _generator(seed, part):
    digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))
