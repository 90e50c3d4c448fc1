"""Small runs for tests of what is done with a trained run: a few steps, no pictures."""

import functools
from unittest.mock import patch

import train_consistency
import train_diffusion
import train_operator
from ups.data.make import make

TINY = ["--batch_size", "4", "--log_every", "1", "--warmup", "1"]
MODEL = ["--model.dim", "8", "--model.depth", "2", "--model.heads", "2", "--model.modes", "2"]
OPERATOR = [*TINY, *MODEL, "--steps", "3", "--val_trajectories", "2"]


@functools.cache  # once for all files of tests
@patch("ups.eval.report.draw_rollouts")
def two_tasks(base, _):
    """A run of burgers1d, two viscosities, and advection1d."""
    folder = base / "two_tasks"
    make("burgers1d", out=folder / "data", samples=20, grid=32, frames=9, nu=[0.01, 0.1])
    make("advection1d", out=folder / "data", samples=20, grid=16, frames=7)
    train_operator.main([*_places(folder), *OPERATOR, "--tasks", "burgers1d", "advection1d",
                         "--steps", "8"])  # four for each, so that conditions count
    return folder / "run"


@patch("train_diffusion.finish_ensembles")
@patch("train_consistency.finish_ensembles")
def add_corrector(run, stage, *_):
    """Train `diffusion` or `consistency` in a run."""
    flags = ["--run", str(run), *TINY, "--steps", "2", "--calls", "2"]
    if stage == "diffusion":
        train_diffusion.main([*flags, *MODEL])
    else:
        train_consistency.main(flags)


def _places(folder):
    return ["--run", str(folder / "run"), "--data", str(folder / "data"),
            "--cache", str(folder / "cache")]
