"""A trained run as a simulator: fields in, fields out. It needs the run's folder, but no data.

    sim = Simulator.load("runs/burgers1d")     # or a folder that `python -m ups.export` wrote
    print(sim)                                 # its fields, parameters and time step
    u = sim.rollout(u0, 40)                    # (B, C, *grid) -> (B, 40, C, *grid)

    u0 -> z0 -> z1_hat -> z2_hat -> ...        stays in latent space; only what is asked for is read

The result is (B, T, C, *grid), with `members` (B, M, T, C, *grid). Numpy in, numpy out; torch in,
torch out, on the device of u0.
"""

import functools
import numbers
import warnings
from pathlib import Path

import torch

from ups.config import UsageError
from ups.data.facts import from_plain
from ups.eval.ensemble import corrected, member_noise
from ups.files import read_json
from ups.latents import TaskLatents, load_codec
from ups.models.precision import products
from ups.stages import load_corrector, load_operator


class Simulator:
    @classmethod
    def load(cls, run, device=None):
        """Read a run or an exported folder; weights that do not belong together are refused."""
        self, run = cls(), Path(run)
        if not run.is_dir():
            raise UsageError(f"{run}: there is no such folder; give a run, such as runs/burgers1d, "
                             "or what `python -m ups.export` wrote.")
        self.run, self.operator = run, load_operator(run)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model, config = self.operator.model.to(self.device), self.operator.config
        self.tasks = {}
        for about in config["fields"]:
            facts = from_plain(about)
            name = facts.name
            codec, mark = load_codec(run / "codec" / name / "model")
            if config["lineage"].get(f"codec of {name}") != mark:
                raise UsageError(f"{run}/codec/{name} is not the codec that {run}/operator was "
                                 "trained with; put that one back.")
            self.tasks[name] = TaskLatents(facts, codec.to(self.device), mark, None, None,
                                           model.width, max(len(t.params) for t in model.tasks))
        return self

    @torch.no_grad()
    @products("highest")
    def rollout(self, u0, steps, params=None, *, task=None, dt=None, frames=None, members=None,
                seed=0):
        """Predict what follows the fields u0 (B, C, *grid).

        params   {"nu": 0.01}: numbers, or one per row; not needed where the data had one value
        task     its name, where the run has several
        dt       size of a step, by default that of the data, which is all that training has seen
        frames   the steps to return, such as range(10, 41, 10); by default all, 1 .. steps
        members  how many to draw from the student, or else the diffusion corrector, of the run
        """
        if task is None and len(self.tasks) == 1:
            task, = self.tasks
        if task not in self.tasks:
            raise UsageError(f"task={task}: choose one of {', '.join(self.tasks)}.")
        index, task = list(self.tasks).index(task), self.tasks[task]
        for name, value in {"steps": steps, "members": members or 0, "seed": seed}.items():
            if not isinstance(value, numbers.Integral):
                raise UsageError(f"{name}={value!r}: it is a whole number.")
        leads = list(range(1, steps + 1) if frames is None else frames)
        if not leads or leads != sorted(set(leads)) or leads[0] < 1 or leads[-1] > steps:
            raise UsageError(f"{steps} steps and frames={frames}: frames are some of 1 .. steps, "
                             "in order.")
        dt = task.facts.dt if dt is None else dt
        if not (dt > 0 and (members is None or members > 0)):
            raise UsageError(f"dt={dt}, members={members}: both must be above 0.")
        u = _fields(u0, task).to(self.device)
        where = (torch.full((len(u),), dt, device=self.device),
                 _condition(params or {}, task, len(u)).to(self.device), index)

        z, step = task.encode(u), self.operator.model
        if members is None:
            states = _states(step, z, leads, *where)
        else:
            how, known = self.corrector.settings, self.corrector.model.leads(index)
            if leads[-1] > known:
                warnings.warn(f"members were learned for up to {known} steps; later ones are drawn "
                              f"as those of step {known}.", stacklevel=4)
            noise = member_noise(seed, range(len(z)), members, 2, *z.shape[1:]).to(z)
            states = corrected(step, self.corrector.model, z, leads[-1], *where, noise, how.calls,
                               how.correct_every, leads)
        out, home = [], u0.device if torch.is_tensor(u0) else "cpu"
        for _, z in states:  # (B, N, D) or (B, M, N, D)
            out.append(task.decode(z).to(home))
        out = torch.stack(out, z.ndim - 2)
        return out if torch.is_tensor(u0) else out.numpy()

    @functools.cached_property
    def corrector(self):
        """The stage that draws members."""
        for stage in finished(self.run):
            loaded = load_corrector(self.run, stage, self.operator)
            loaded.model.to(self.device)
            return loaded
        raise UsageError(f"{self.run} has no corrector to draw members from; train one with "
                         f"`accelerate launch train_diffusion.py --run {self.run}`.")

    def __repr__(self):
        lines = [f"Simulator of {self.run} on {self.device}"]
        for task in self.tasks.values():
            spec = task.facts
            axes = zip(spec.axes, spec.grid, spec.domain, strict=True)
            words = [f"channels {', '.join(spec.channels)}",
                     *(f"{axis} in [{a:g}, {b:g}], {n} points" for axis, n, (a, b) in axes),
                     " ".join(spec.boundary), f"dt {spec.dt:g}",
                     *(f"{name} {_list(sorted({one.low, one.high}))}" for name, one in
                       zip(spec.params, spec.scales, strict=True))]
            lines.append(f"  {task.name}: {'; '.join(words)}")
        stage = next(iter(finished(self.run)), "nothing")
        return "\n".join([*lines, f"  members are drawn by: {stage}"])


def finished(run):
    """The correctors that a run has, the student first: it needs one or two calls."""
    return [stage for stage in ("consistency", "diffusion")
            if read_json(run / stage / "exit.json").get("status") == "done"]


def _states(step, z, leads, *where):
    """Yield (k, latents) at the leads k."""
    for k in range(1, leads[-1] + 1):
        z = step(z, *where)
        if k in leads:
            yield k, z


def _fields(u0, task):
    """u0 as float32, of the right shape and finite."""
    u, spec = torch.as_tensor(u0).float(), task.facts
    if u.shape[1:] != (len(spec.channels), *spec.grid) or not u.numel():
        raise UsageError(f"u0 has the shape {tuple(u.shape)}; {task.name} here takes (batch, "
                         f"{_list([len(spec.channels), *spec.grid])}): channels "
                         f"{', '.join(spec.channels)}, axes {', '.join(spec.axes)}.")
    if not u.isfinite().all():
        raise UsageError("u0 holds NaN or Inf.")
    return u


def _condition(given, task, batch):
    """PDE parameters as the operator wants them, (B, P)."""
    names, columns = task.facts.params, []
    if wrong := [name for name in given if name not in names]:
        raise UsageError(f"{task.name} has no parameter {wrong[0]}; it has "
                         f"{', '.join(names) or 'none'}.")
    for name, scale in zip(names, task.facts.scales, strict=True):
        seen = f"{scale.low:g} to {scale.high:g}"
        if name not in given and scale.low < scale.high:
            raise UsageError(f"params lacks {name}; the data had {seen}.")
        value = torch.as_tensor(given.get(name, scale.low), dtype=torch.float64).cpu()
        if value.shape not in ((), (batch,)):
            raise UsageError(f"params[{name!r}] has the shape {tuple(value.shape)}; give a number, "
                             f"or {batch} of them, one per row of u0.")
        if not value.isfinite().all() or scale.log and (value <= 0).any():
            raise UsageError(f"params[{name!r}] holds NaN, Inf, or what has no logarithm.")
        slack = 1e-6 * max(abs(scale.low), abs(scale.high))
        if (value < scale.low - slack).any() or (value > scale.high + slack).any():
            warnings.warn(f"{name} was {seen} in training; what is outside is a guess.",
                          stacklevel=5)
        columns.append(value.expand(batch))
    return task.condition(torch.stack(columns, 1) if columns else torch.ones(batch, 0))


def _list(values):
    return ", ".join(f"{value:g}" for value in values)
