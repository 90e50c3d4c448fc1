"""Small runs for tests of what is done with a trained run: a few steps, no pictures."""

import functools
from unittest.mock import patch

import numpy as np

import train_consistency
import train_diffusion
import train_ensemble
import train_operator
from ups.data import write_fields
from ups.data.make import make

TINY = ["--batch_size", "4", "--log_every", "1", "--warmup", "1"]
MODEL = ["--model.dim", "8", "--model.depth", "2", "--model.heads", "2", "--model.modes", "2"]
OPERATOR = [*TINY, *MODEL, "--steps", "3", "--val_trajectories", "2"]


@functools.cache  # once for all files of tests
def two_tasks(base):
    """A run of burgers1d, two viscosities, and advection1d."""
    folder = base / "two_tasks"
    make("burgers1d", out=folder / "data", samples=20, grid=32, frames=9, nu=[0.01, 0.1])
    make("advection1d", out=folder / "data", samples=20, grid=16, frames=7)
    train_operator.main([*_places(folder), *OPERATOR, "--tasks", "burgers1d", "advection1d",
                         "--strides", "1", "2", "4", "--steps", "24"])  # four for each set
    return folder / "run"


def write_driven(path, samples=24, grid=16, frames=6, dt=0.1, seed=0, **facts):
    """A field that is carried along, pushed by a given force, and by k of it: k > 0 or below."""
    rng, x = np.random.default_rng(seed), 2 * np.pi * np.arange(grid) / grid
    k = np.linspace(-1, 2, samples)
    waves = np.sin(x + rng.uniform(0, 6, (samples, 2 * frames, 1)))
    u = [np.cos(x - rng.uniform(0, 6, (samples, 1)))]
    for step in range(frames - 1):
        u.append(0.9 * np.roll(u[-1], 1, -1) + k[:, None] * dt * waves[:, step])
    return write_fields(path, np.stack(u, 1), dt=dt, channels="u", axes="x", boundary="periodic",
                        params={"k": k}, inputs={"force": waves[:, :frames]}, **facts)


@functools.cache
def driven(base):
    """A run on data with an input that varies in time and a parameter of both signs."""
    folder = base / "driven"
    folder.mkdir()
    train_operator.main(["--run", str(folder / "run"), "--cache", str(folder / "cache"), *OPERATOR,
                         "--data", str(write_driven(folder / "driven.h5"))])
    return folder / "run"


@patch("ups.eval.finish.draw_ensemble")
def add_generator(run, stage, *_):
    """Train `ensemble`, `diffusion` or `consistency` in a run."""
    script = {"ensemble": train_ensemble, "diffusion": train_diffusion,
              "consistency": train_consistency}[stage]
    flags = ["--run", str(run), *TINY, "--steps", "2", "--members", "2"]
    script.main([*flags, *(["--calls", "2", *MODEL] if stage == "diffusion" else [])])


def _places(folder):
    return ["--run", str(folder / "run"), "--data", str(folder / "data"),
            "--cache", str(folder / "cache")]
