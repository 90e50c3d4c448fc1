"""Small runs for tests of what is done with a trained run."""

import functools
from unittest.mock import patch

import torch

import train_codec
import train_operator
from ups.data.make import make
from ups.models.corrector import Corrector
from ups.models.latent_operator import OperatorConfig
from ups.stages import load_operator
from ups.train.checkpoint import export_model
from ups.train.policy import write_json

TINY = ["--batch_size", "4", "--log_every", "1", "--warmup", "1"]
OPERATOR = ["--steps", "3", "--unroll", "2", "--val_trajectories", "2", "--model.dim", "8",
            "--model.depth", "1", "--model.heads", "2", "--model.modes", "2"]


@functools.cache  # once for all files of tests
@patch("ups.eval.report.draw_rollouts")
def two_tasks(base, _):
    """A run of burgers1d, two viscosities, and advection1d, in a few steps."""
    folder = base / "two_tasks"
    make("burgers1d", out=folder / "data", samples=20, grid=32, frames=9, nu=[0.01, 0.1])
    make("advection1d", out=folder / "data", samples=20, grid=16, frames=7)
    train_operator.main([*_places(folder), *TINY, *OPERATOR, "--tasks", "burgers1d", "advection1d"])
    return folder / "run"


@patch("ups.eval.report.draw_rollouts")
@patch("ups.eval.reconstruction.draw_codec")
def any_point(folder, *_):
    """A run of diffreact2d with the learned codec."""
    make("diffreact2d", out=folder / "data", samples=20, grid=16, frames=13, t_end=1.0)
    task = [*_places(folder), *TINY, "--tasks", "diffreact2d"]
    train_codec.main([*task, "--patch", "4", "--steps", "2", "--model.hidden", "8",
                      "--model.depth", "1"])
    train_operator.main([*task, *OPERATOR, "--codec", "grid"])
    return folder / "run"


def add_corrector(run, stage, leads=8):
    """A finished stage `diffusion` or `consistency` with random weights."""
    operator = load_operator(run)
    sizes = {"dim": 8, "depth": 1, "heads": 2, "modes": 2}
    torch.manual_seed(len(stage))
    scales = [torch.linspace(0.1, 0.3, leads)[:, None] * (torch.arange(operator.model.width)
                                                          < task.width)
              for task in operator.model.tasks]
    model = Corrector(OperatorConfig(**sizes), operator.model.tasks, scales, stage)
    torch.nn.init.normal_(model.net.body.out.weight, std=0.1)
    export_model(run / stage / "model", model.state_dict(), {
        "stage": stage, "model": sizes, "tasks": operator.config["tasks"],
        "scales": [list(scale.shape) for scale in scales], "lineage": {"operator": operator.mark}})
    write_json(run / stage / "config.json", {"calls": 2, "correct_every": 1, "run": str(run)})
    write_json(run / stage / "exit.json", {"status": "done"})


def _places(folder):
    return ["--run", str(folder / "run"), "--data", str(folder / "data"),
            "--cache", str(folder / "cache")]
