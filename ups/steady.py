"""The door where the steady prior meets latents, fields and an operator to stand beside."""

from pathlib import Path
from types import SimpleNamespace

import torch

from ups.config import UsageError
from ups.latents import open_tasks
from ups.models.body import BodyConfig
from ups.models.steady import SteadyPrior, orientations, size_of, turned
from ups.stages import load_operator, load_stage
from ups.train.step import eager


def load_steady(run):
    """The frozen prior of a finished stage, as `load_operator` gives an operator."""
    def build(config, tasks):
        return SteadyPrior(*(BodyConfig(**config[key]) for key in ("model", "denoiser")),
                           *tasks)

    return load_stage(run, "steady", build)


def check_steady(tasks):
    """Refuse what is not one steady data set."""
    if len(tasks) != 1 or not tasks[0].facts.steady:
        raise UsageError(f"{' and '.join(task.name for task in tasks)}: this stage takes one data "
                         "set whose facts say `steady`, such as darcy2d.")


def operator_beside(accelerator, cfg):
    """(model, task, index) of --operator, or of the operator of the run where there is one."""
    run = cfg.operator or cfg.run
    if not cfg.operator and not (Path(run) / "operator" / "model" / "config.json").exists():
        return None
    operator, name = load_operator(run), cfg.tasks[0].split(":")[0]
    names = [task.name for task in operator.model.tasks]
    if name not in names:
        raise UsageError(f"{Path(run) / 'operator'} was trained on {', '.join(names)}, not on "
                         f"{name}; give another --operator.")
    settings = vars(operator.settings) | {"run": run, "data": cfg.data, "cache": cfg.cache}
    tasks = open_tasks(accelerator, SimpleNamespace(**settings))
    index = names.index(name)
    return operator.model.to(accelerator.device), tasks[index], index


@torch.no_grad()
def differences(windows, task, limit=1024):
    """(z1 - z0) / size (B, N, D) of train windows in all orientations, a batch at a time."""
    device = task.codec.weight.device
    for rows in torch.arange(min(limit, len(windows))).split(64):
        batch = windows.__getitems__([(0, row, (0, row)) for row in rows.tolist()])
        u = task.codec.decode(batch["z"].flatten(0, 1).to(device)).unflatten(0, (-1, 2))
        for z0, z1, size in _views(u, batch["cond"].to(device), task):
            yield (z1 - z0) / size[:, None, None]


@eager
@torch.no_grad()
def left_over(prior, task, limit=256):
    """Deviation (D,) of x - m(a) over the fit split, which the mean was not trained on."""
    total, count, device = 0.0, 0, task.codec.weight.device
    for chosen in task.fields.split("fit")[:limit].split(32):
        u, cond = task.fields.read(chosen).to(device), task.cond(chosen).to(device)
        for z0, z1, size in _views(u, cond, task):
            error = prior.coordinates(z0, z1, size) - prior(z0, cond)
            total, count = total + error.double().square().mean(1).sum(0), count + len(u)
    return (total / count).sqrt() * (prior.dual != 0).any(0)


def _views(u, cond, task):
    """z0, z1 and size of fields (B, 2, C, *grid), one orientation after the other."""
    for turn in range(orientations(task.codec.grid)):
        view = turned(u, torch.full((len(u),), turn, device=u.device))
        z0, z1 = task.codec.encode(view.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        yield z0, z1, size_of(view[:, 0, 0], cond)
