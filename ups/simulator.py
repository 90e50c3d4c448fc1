"""A trained run as a simulator: fields in, fields out. It needs the run's folder, but no data.

    sim = Simulator.load("runs/burgers1d")     # or a folder that the last line below has written
    print(sim)                                 # its fields, parameters and time step
    u = sim.rollout(u0, 40)                    # (B, C, *grid) -> (B, 40, C, *grid)

    python -m ups.simulator runs/burgers1d OUT # export: weights, configurations and a model card

u0 -> z0 -> z1_hat -> z2_hat -> .. stays in latent space; only what is asked for is decoded. The
result is (B, T, C, *grid), with `members` (B, M, T, C, *grid). Numpy in, numpy out; torch in, torch
out, on the device of u0. An export has the layout of a run, without checkpoints.
"""

import functools
import numbers
import shlex
import shutil
import warnings
from pathlib import Path

import torch

from ups.config import Parser, UsageError, command
from ups.eval.ensemble import corrected, member_noise
from ups.eval.forecasts import inputs_at
from ups.files import read_json, write_json, written
from ups.latents import TaskLatents
from ups.models.precision import products
from ups.stages import (
    check_dt,
    facts_of,
    finished,
    load_class,
    load_corrector,
    load_operator,
    own_codec,
)
from ups.train.run import RunConfig

FILES = ("model/*", "exit.json", "test.json", "*.png")  # of a stage, that are exported
MARGIN = 0.25  # of the range in training: a field that leaves it by more is told


class Simulator:
    @classmethod
    def load(cls, run, device=None, model=None):
        """Read a run or an exported folder; weights that do not belong together are refused.

        `model` is the class of an operator of your own: no code is loaded because a run names it.
        """
        self, run = cls(), Path(run)
        if not run.is_dir():
            raise UsageError(f"{run}: there is no such folder; give a run, such as runs/burgers1d, "
                             "or what `python -m ups.simulator` wrote.")
        self.run, self.operator = run, load_operator(run, model)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.operator.model.to(self.device)
        self.tasks, known = {}, facts_of(self.operator)
        for name, facts in known.items():
            codec, mark = own_codec(run, name, self.operator)
            self.tasks[name] = TaskLatents(facts, codec.to(self.device), mark)
        for task in self.tasks.values():
            task.width = max(t.codec.spec.width for t in self.tasks.values())
            task.params = max(len(facts.params) for facts in known.values())
        return self

    @torch.no_grad()
    @products("highest")
    def rollout(self, u0, steps, params=None, inputs=None, *, task=None, dt=None, frames=None,
                members=None, seed=0):
        """Predict what follows the fields u0 (B, C, *grid).

        params   {"nu": 0.01}: numbers, or one per row; not needed where the data had one value
        inputs   channels that are given, in physical units: (B, E, *grid), or (B, T, E, *grid) at
                 the beginning of each step
        task     its name, where the run has several
        dt       size of a step; only that of the training data is allowed
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
        if members is not None and members < 1:
            raise UsageError(f"members={members}: it must be above 0.")
        check_dt(task.facts.dt if dt is None else dt, task.facts)
        u = _fields(u0, task).to(self.device)
        dt = torch.full((len(u),), task.facts.dt, device=self.device)
        cond = _condition(params or {}, task, len(u)).to(self.device)
        given = _inputs(inputs, task, len(u), leads[-1])
        if given is not None:  # tokens (B, T or 1, N, E)
            given = task.codec.encode_inputs(given.flatten(0, 1).to(self.device)).unflatten(
                0, given.shape[:2])

        z, step = task.encode(u), self.operator.model
        if members is None:
            states = _states(step, z, leads, dt, cond, index, given)
        else:
            how, known = self.corrector.settings, self.corrector.model.leads(index)
            if leads[-1] > known:
                warnings.warn(f"members were learned for up to {known} steps; later ones are drawn "
                              f"as those of step {known}.", stacklevel=4)
            noise = member_noise(seed, range(len(z)), members, 2, *z.shape[1:]).to(z)
            states = corrected(step, self.corrector.model, z, leads[-1], dt, cond, index, noise,
                               how.calls, how.correct_every, leads, inputs=given)
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
        for name, spec in ((name, task.facts) for name, task in self.tasks.items()):
            axes = zip(spec.axes, spec.grid, spec.domain, spec.boundary, strict=True)
            words = [f"channels {', '.join(spec.channels)}",
                     *([f"inputs {', '.join(spec.inputs)}"] if spec.inputs else []),
                     *(f"{axis} in [{a:g}, {b:g}], {n} points, {kind}"
                       for axis, n, (a, b), kind in axes), f"dt {spec.dt:g}",
                     *(f"{param} {_list(sorted({scale.low, scale.high}))}"
                       for param, scale in zip(spec.params, spec.scales, strict=True))]
            lines.append(f"  {name}: {'; '.join(words)}")
        return "\n".join([*lines, f"  members are drawn by: {(*finished(self.run), 'nothing')[0]}"])


def _states(step, z, leads, dt, cond, index, given):
    """Yield (k, latents) at the leads k."""
    for k in range(1, leads[-1] + 1):
        z = step(z, dt, cond, index, inputs_at(given, k - 1))
        if k in leads:
            yield k, z


def _fields(u0, task):
    """u0 as float32, of the right shape and finite; warns where training saw nothing alike."""
    u, spec = torch.as_tensor(u0).float(), task.facts
    if u.shape[1:] != (len(spec.channels), *spec.grid) or not u.numel():
        raise UsageError(f"u0 has the shape {tuple(u.shape)}; {task.name} here takes (batch, "
                         f"{_list([len(spec.channels), *spec.grid])}): channels "
                         f"{', '.join(spec.channels)}, axes {', '.join(spec.axes)}.")
    if not u.isfinite().all():
        raise UsageError("u0 holds NaN or Inf.")
    least, most = (u.movedim(1, 0).flatten(1).cpu().aminmax(dim=1))
    for name, a, b, low, high in zip(spec.channels, least, most, *task.codec.seen, strict=True):
        if a < low - MARGIN * (high - low) or b > high + MARGIN * (high - low):
            warnings.warn(f"{name} of u0 is {a:.3g} to {b:.3g}; in training it was {low:.3g} to "
                          f"{high:.3g}. What is so far outside is a guess.", stacklevel=5)
    return u


def _inputs(inputs, task, batch, steps):
    """The given channels as float32 (B, T or 1, E, *grid), T >= steps; None where there are none"""
    spec = task.facts
    if (inputs is None) == (not spec.inputs):
        if inputs is None:
            return None
    elif inputs is not None:
        raise UsageError(f"{task.name} has no inputs; leave inputs= out.")
    one = (len(spec.inputs), *spec.grid)
    wanted = (f"channels {', '.join(spec.inputs)} as (batch, {_list(one)}), or with all times, "
              f"(batch, {steps} or more, {_list(one)})")
    if inputs is None:
        raise UsageError(f"{task.name} needs inputs=: {wanted}.")
    v = torch.as_tensor(inputs).float()
    v = v[:, None] if v.ndim == 1 + len(one) else v
    if v.shape[2:] != one or len(v) not in (1, batch) or 1 < v.shape[1] < steps or not v.numel():
        raise UsageError(f"inputs have the shape {tuple(torch.as_tensor(inputs).shape)}; "
                         f"{task.name} takes {wanted}.")
    if not v.isfinite().all():
        raise UsageError("inputs hold NaN or Inf.")
    return v.expand(batch, *v.shape[1:])


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


def export(run, out, license=None, model=None):
    """Write `out` as a whole or not at all; it may replace an earlier export, nothing else."""
    run, out = Path(run), Path(out).absolute()
    foreign = out.is_file() or out.exists() and any(out.iterdir())
    if foreign and read_json(out / "config.json").get("library_name") != "ups":
        raise UsageError(f"{out} was not written by ups.simulator; give a new folder.")
    sim = Simulator.load(run, "cpu", model)  # refuses what does not belong together
    marks = {f"codec/{task.name}": task.fingerprint for task in sim.tasks.values()}
    marks |= {"operator": sim.operator.mark} | {
        stage: load_corrector(run, stage, sim.operator).mark for stage in finished(run)}
    systems = RunConfig(run=".")  # in place of the paths of this machine
    with written(out) as partial:
        for pattern in [f"{stage}/{file}" for stage in marks for file in FILES]:
            for path in run.glob(pattern):
                if not path.resolve().is_relative_to(run.resolve()):
                    raise UsageError(f"{path} is a link that leaves the run; put the file there.")
                target = partial / path.relative_to(run)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        for stage in marks:
            if settings := read_json(run / stage / "config.json"):
                write_json(partial / stage / "config.json",
                           {key: getattr(systems, key, value) for key, value in settings.items()})
        write_json(partial / "config.json", {"library_name": "ups", "stages": marks})
        (partial / "README.md").write_text(card(sim, out.name, marks, license))
        Simulator.load(partial, "cpu", model)  # what will be read is what was written
    return marks


def card(sim, name, marks, license=None):
    """The model card: front matter of the hub, use, numbers, lineage."""
    front = ["library_name: ups", *([f"license: {license}"] if license else []),
             f"tags: [pde, surrogate, neural-operator, {', '.join(sim.tasks)}]"]
    spec = next(iter(sim.tasks.values())).facts
    shape = _list([len(spec.channels), *spec.grid])
    given = "".join([", params={..}" * any(s.low < s.high for s in spec.scales),
                     ", inputs=v" * bool(spec.inputs),
                     f', task="{spec.name}"' * (len(sim.tasks) > 1)])
    test = read_json(sim.run / "operator" / "test.json")
    rows = ["| nRMSE on the test split, all steps | operator | persistence |", "|---|---|---|"]
    for task, result in test.get("tasks", {}).items():
        errors = [f"{result['nrmse_rollout'][row]:.3g}" for row in ("operator", "persistence")]
        rows.append(f"| {' | '.join([task, *errors])} |")
    return "\n".join([
        "---", *front, "---", f"# {name}", "",
        "A latent simulator for partial differential equations, trained with UPS.", "",
        "```python", "from ups import Simulator", "",
        f'sim = Simulator.load("{name}")  # this folder',
        f"u = sim.rollout(u0, 40{given})  # u0 (batch, {shape}) -> (batch, 40, {shape})", "```", "",
        "```", str(sim).replace(f" of {sim.run} on {sim.device}", ""), "```", "", *rows, "",
        *(f"![roll-out](operator/{path.name})\n"
          for path in sorted((sim.run / "operator").glob("rollout*.png"))),
        "| stage | fingerprint |", "|---|---|", *(f"| {s} | {m} |" for s, m in marks.items()), ""])


def main(argv=None):
    parser = Parser(prog="python -m ups.simulator", description=__doc__)
    parser.add_argument("run", help="such as runs/burgers1d")
    parser.add_argument("out", help="folder to write, named as the model")
    parser.add_argument("--license", help="of the weights, as the hub spells it, such as mit")
    parser.add_argument("--model", help="FILE.py:Class of an operator of your own")
    args = parser.parse_args(argv)
    marks = export(args.run, args.out, args.license, load_class(args.model))
    size = sum(path.stat().st_size for path in Path(args.out).rglob("*.*"))
    print(f"{args.out}: {', '.join(marks)}; {size / 2**20:.1f} MiB. Upload it with\n"
          f"  hf upload {shlex.join([f'USER/{Path(args.out).name}', args.out])}")


if __name__ == "__main__":
    command(main)
