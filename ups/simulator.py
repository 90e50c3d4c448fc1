"""A trained run as a simulator: fields in, fields out. It needs the run's folder, but no data.

    sim = Simulator.load("runs/burgers1d")     # or a folder that the last line below has written
    print(sim)                                 # its fields, parameters and time step
    u = sim.rollout(u0, 40)                    # (B, C, *grid) -> (B, 40, C, *grid)

    python -m ups.simulator runs/burgers1d OUT # export: weights, configurations and a model card

u0 -> z0 -> z1_hat -> z2_hat -> .. stays in latent space; only what is asked for is decoded. The
result is (B, T, C, *grid), with `members` (B, M, T, C, *grid). Numpy in, numpy out; torch in, torch
out, on the device of u0. Rows go through in batches that fit, from a memory map into a file if you
like. An export has the layout of a run, without checkpoints.
"""

import contextlib
import functools
import math
import numbers
import shlex
import shutil
import warnings
from pathlib import Path

import h5py
import numpy as np
import torch
from tqdm import tqdm

from ups.config import Parser, UsageError, command
from ups.eval.ensemble import member_noise, roll_out_members
from ups.files import read_json, write_json, written
from ups.latents import TaskLatents
from ups.models.precision import PRODUCTS, lowered, products
from ups.rollout import choose_plan, plan_error, roll_out, within
from ups.stages import (
    facts_of,
    finished,
    load_class,
    load_generator,
    load_operator,
    own_codec,
    preferred,
)
from ups.train.run import RunConfig
from ups.train.step import CudaGraphed, is_out_of_memory

FILES = ("model/*", "exit.json", "test.json", "choices.json", "*.png")  # that are exported
MARGIN = 0.25  # of the range in training: a field that leaves it by more is told
TOKENS = {"cpu": 2**11, "cuda": 2**19}  # of all rows that go through together; a CPU's cache


class Simulator:
    @classmethod
    def load(cls, run, device=None, model=None, compile=False, precision=None):
        """Read a run or an exported folder; weights that do not belong together are refused.

        model      the class of an operator of your own: no code is loaded because a run names it
        compile    the operator; on CUDA, from the third batch of the same size on, a whole roll-out
                   is one CUDA graph
        precision  of the update, never of the state: float32, tf32 or bfloat16; by default the
                   fastest that costs no accuracy on the validation split, and float32 on a CPU
        """
        if precision not in (None, *PRODUCTS):
            raise UsageError(f"precision={precision!r}: it is one of {', '.join(PRODUCTS)}.")
        self, run = cls(), Path(run)
        if not run.is_dir():
            raise UsageError(f"{run}: there is no such folder; give a run, such as runs/burgers1d, "
                             "or what `python -m ups.simulator` wrote.")
        self.run, self.operator = run, load_operator(run, model)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.operator.model.to(self.device)
        self.tasks, self.precisions, known = {}, {}, facts_of(self.operator)
        for name, facts in known.items():
            codec, mark = own_codec(run, name, self.operator.config["lineage"])
            self.tasks[name] = TaskLatents(facts, codec.to(self.device), mark,
                                           plans=self.operator.plans(name),
                                           history=self.operator.history)
            chosen = self.operator.choices.get(name, {}).get("precision", "float32")
            self.precisions[name] = precision or (
                chosen if self.device.type == "cuda" else "float32")
        for task in self.tasks.values():
            task.width = max(t.codec.spec.width for t in self.tasks.values())
            task.params = max(len(facts.params) for facts in known.values())
        self.models = {name: lowered(self.operator.model, name)
                       for name in {"float32", *self.precisions.values()}}
        self.graphs, self.static = None, {}
        if compile:
            for one in self.models.values():
                one.compile(dynamic=False)
        if compile and self.device.type == "cuda":
            self.graphs = CudaGraphed(lambda key: self._predict(*key[:4], *self.static[key]))
        return self

    def rollout(self, u0, steps=None, params=None, inputs=None, *, times=None, accuracy=None,
                stride=None, task=None, members=None, seed=0, grad=False, batch=None, out=None):
        """Predict what follows the fields u0 (B, C, *grid): `steps` frames, or those at `times`.
        u0 of an operator with a history of H > 1 frames is (B, H, C, *grid), the last of them now.

        params   {"nu": 0.01}: numbers, or one per row; not needed where the data had one value
        inputs   channels that are given, in physical units: {"vx": (B, *grid)}, or (B, T, *grid) at
                 the beginning of each step of the data
        times    after u0, ascending: multiples of the dt of the training data
        accuracy the nRMSE, mean of these frames, that the cheapest way there may have; without it
                 the most accurate way is taken, both as measured on the validation split
        stride   the longest step in frames, one of those of training: instead of a choice
        task     its name, where the run has several
        members  trajectories to draw: by the generator of the run that scores best on validation,
                 or, where a run has none, by the operator from perturbed inputs
        grad     let gradients reach u0, params and inputs: the result is a tensor
        batch    rows that go through at a time; by default what fits
        out      where the result goes: "u.h5", or an array with its shape such as a numpy memmap
        """
        if task is None and len(self.tasks) == 1:
            task, = self.tasks
        if task not in self.tasks:
            raise UsageError(f"task={task}: choose one of {', '.join(self.tasks)}.")
        index, task = list(self.tasks).index(task), self.tasks[task]
        leads = _leads(steps, times, task.facts)
        longest = _plan(task.plans, leads, accuracy, stride)
        for name, value, least in (("members", members, 1), ("batch", batch, 1), ("seed", seed, 0)):
            if not isinstance(value, numbers.Integral) and (value is not None or name == "seed"):
                raise UsageError(f"{name}={value!r}: it is a whole number.")
            if value is not None and value < least:
                raise UsageError(f"{name}={value}: it must be at least {least}.")
        u = _fields(u0, task)
        rows = u, _condition(params or {}, task, len(u)), _inputs(inputs, task, len(u), leads[-1])
        if grad:
            if (members, batch, out) != (None, None, None):
                raise UsageError("grad=True keeps every step in memory: leave members, batch and "
                                 "out out.")
            here = self._here(rows)
            return self._predict(index, leads, longest, "float32", *here).to(u.device)
        tokens = math.prod(task.codec.tokens) * (members or 1)
        size = min(len(u), batch or max(1, TOKENS[self.device.type] // tokens))
        shape = len(u), *([members] if members else []), len(leads), len(task.facts.channels)
        shape, start = (*shape, *task.facts.grid), 0
        with (torch.inference_mode(), products("highest"), _opened(out, shape, u0) as result,
              tqdm(total=len(u), unit="row", disable=size == len(u)) as bar):
            while start < len(u):
                chosen = slice(start, start + size)
                part = self._here([x if x is None else x[chosen] for x in rows])
                try:
                    if members:
                        trajectories = range(len(u))[chosen]
                        frames = self._draw(index, leads, *part, members, seed, trajectories)
                    else:
                        precision = self.precisions[task.name]
                        frames = self._replay((index, leads, longest, precision, size), part)
                except Exception as error:
                    if not is_out_of_memory(error) or size == 1:
                        raise
                    size //= 2
                    continue
                result[chosen] = (frames.to(result.device) if torch.is_tensor(result)
                                  else frames.cpu().numpy())
                start += len(frames)
                bar.update(len(frames))
        return Path(out) if isinstance(out, str | Path) else result

    def _here(self, rows):
        return [x if x is None else x.to(self.device, torch.float32) for x in rows]

    def _predict(self, index, leads, longest, precision, u, cond, given):
        """The frames (B, T, C, *grid) at the steps `leads`, by the plan `longest`."""
        task, model = list(self.tasks.values())[index], self.models[precision]
        z, dt, tokens = self._begin(task, u, given)
        with products(PRODUCTS[precision]):
            frames = {lead: task.decode(z) for lead, z in roll_out(
                model, z, dt, cond, index, leads, within(task.plans, longest), tokens)}
        return torch.stack([frames[lead] for lead in leads], 1)

    def _replay(self, key, part):
        """`_predict`, with `compile` as a CUDA graph of batches of `size` rows."""
        if self.graphs is None:
            return self._predict(*key[:4], *part)
        rows, size = len(part[0]), key[4]
        fill = torch.arange(size, device=self.device).clamp(max=rows - 1)  # the last batch
        part = [x if x is None else x[fill] for x in part]
        key += (part[2] is not None and part[2].shape,)
        for x, static in zip(part, self.static.setdefault(key, part), strict=True):
            if x is not None:
                static.copy_(x)
        return self.graphs(key)[:rows]

    def _draw(self, index, leads, u, cond, given, members, seed, rows):
        """The members (B, M, T, C, *grid), those of a row a function of (seed, row)."""
        task = list(self.tasks.values())[index]
        z, dt, tokens = self._begin(task, u, given)
        noise = functools.partial(member_noise, seed, rows, members, self.device)
        states = roll_out_members(self.generator(task.name), z, leads[-1], dt, cond, index, noise,
                                  task.noise_scale.to(z), tokens)
        return torch.stack([task.decode(z) for k, z in enumerate(states, start=1) if k in leads], 2)

    def _begin(self, task, u, given):
        """Latents (B, N, D), dt (B,) and, if any, tokens (B, T or 1, N, E) of what is given."""
        if given is not None:
            tokens = task.codec.encode_inputs(given.flatten(0, 1))
            given = tokens.unflatten(0, given.shape[:2])
        return task.encode(u), torch.full((len(u),), task.facts.dt, device=self.device), given

    @functools.cache  # noqa: B019
    def generator(self, name):
        """What draws members of a task."""
        stage = preferred(self.run, name)
        generator = load_generator(self.run, stage, self.operator).model
        return generator.to(self.device) if isinstance(generator, torch.nn.Module) else generator

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
            best = preferred(self.run, name)
            best = "the operator from perturbed inputs" if best == "operator" else best
            lines.append(f"    members are drawn by: {best}")
        lines.append(f"  precision of the update: {', '.join(sorted({*self.precisions.values()}))}")
        return "\n".join(lines)


def _leads(steps, times, facts):
    """The steps 1, 2, .. whose frames are asked for."""
    if (steps is None) == (times is None):
        raise UsageError("give the number of steps, or times=.")
    if times is None:
        if not isinstance(steps, numbers.Integral) or steps < 1:
            raise UsageError(f"steps={steps!r}: it is a whole number above 0.")
        return tuple(range(1, steps + 1))
    leads = []
    for time in times:
        lead = max(1, round(time / facts.dt))
        if abs(time / facts.dt - lead) > 0.01:
            raise UsageError(f"times holds {time:g}, and steps are of {facts.dt:g} from u0 on; the "
                             f"nearest is {lead * facts.dt:g}.")
        leads.append(lead)
    if not leads or leads != sorted(set(leads)):
        raise UsageError("times are one or more, in ascending order.")
    return tuple(leads)


def _plan(plans, leads, accuracy, stride):
    """The longest stride to take: ups/rollout.py."""
    if stride not in (None, *plans):
        raise UsageError(f"stride={stride!r}: this run has learned steps of "
                         f"{', '.join(map(str, plans))} frames.")
    if None not in (accuracy, stride):
        raise UsageError("give accuracy= or stride=, not both.")
    if accuracy is not None and not all(plans.values()):
        raise UsageError("accuracy= needs the errors of validation, and the run has no "
                         "operator/choices.json with them; leave accuracy out.")
    longest = stride or choose_plan(plans, leads, accuracy)
    if longest is None:
        best = min(plan_error(known, leads) for known in plans.values())
        raise UsageError(f"accuracy={accuracy:g}: no way to these frames is so accurate; the best "
                         f"has {best:.2g} on the validation split.")
    return longest


@contextlib.contextmanager
def _opened(out, shape, u0):
    """What takes the result row by row; a file is whole, or not there."""
    if out is None:
        yield (torch.empty(shape, device=u0.device) if torch.is_tensor(u0)
               else np.empty(shape, np.float32))
    elif isinstance(out, str | Path):
        partial = Path(f"{out}.partial")
        try:
            with h5py.File(partial, "w") as file:
                yield file.create_dataset("u", shape, "float32")
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
    else:
        if tuple(out.shape) != shape:
            raise UsageError(f"out has the shape {tuple(out.shape)}; this gives {shape}.")
        yield out


def _tensor(values):
    with warnings.catch_warnings(action="ignore"):  # of a map that is read-only: it is only read
        return torch.as_tensor(values)


def _fields(u0, task):
    """u0 as a tensor of the right shape, finite; warns where training saw nothing alike."""
    u, facts = _tensor(u0), task.facts
    wanted = *([task.history] if task.history > 1 else []), len(facts.channels), *facts.grid
    if u.shape[1:] != wanted or not u.numel():
        raise UsageError(f"u0 has the shape {tuple(u.shape)}; {task.name} here takes (batch, "
                         f"{_list(wanted)}): {'frames, ' * (task.history > 1)}channels "
                         f"{', '.join(facts.channels)}, axes {', '.join(facts.axes)}.")
    seen = []
    for piece in u.detach().split(256):
        if not piece.isfinite().all():
            raise UsageError("u0 holds NaN or Inf.")
        piece = piece.flatten(0, 1) if task.history > 1 else piece
        seen.append(torch.stack(piece.movedim(1, 0).flatten(1).cpu().aminmax(dim=1)).float())
    least, most = torch.stack(seen).amin(0)[0], torch.stack(seen).amax(0)[1]
    for name, a, b, low, high in zip(facts.channels, least, most, *task.codec.seen, strict=True):
        if a < low - MARGIN * (high - low) or b > high + MARGIN * (high - low):
            warnings.warn(f"{name} of u0 is {a:.3g} to {b:.3g}; in training it was {low:.3g} to "
                          f"{high:.3g}. What is so far outside is a guess.", stacklevel=3)
    return u


def _inputs(inputs, task, batch, steps):
    """The given channels (B, T or 1, E, *grid), T >= steps; None where there are none."""
    facts, names = task.facts, [*inputs] if isinstance(inputs, dict) else []
    if {*names} != {*facts.inputs} or inputs is not None and not names:
        raise UsageError(f"inputs are {', '.join(names) or 'none'}; {task.name} takes "
                         f"{', '.join(facts.inputs) or 'none'}, by name.")
    if not facts.inputs:
        return None
    parts, grid = [_tensor(inputs[name]) for name in facts.inputs], tuple(facts.grid)
    parts = [v[:, None] if v.ndim == 1 + len(grid) else v for v in parts]  # (B, T or 1, *grid)
    for v in parts:
        if v.shape[2:] != grid or len(v) not in (1, batch) or 1 != v.shape[1] < steps:
            raise UsageError(f"an input has the shape {tuple(v.shape)}; each is (batch, "
                             f"{_list(grid)}), or at all times (batch, {steps} or more, "
                             f"{_list(grid)}).")
        if not all(piece.isfinite().all() for piece in v.split(256)):
            raise UsageError("inputs hold NaN or Inf.")
    parts = [v[:, :steps] if v.shape[1] > 1 else v for v in parts]
    v = torch.stack(torch.broadcast_tensors(*parts), 2)
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
                          stacklevel=3)
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
        stage: load_generator(run, stage, sim.operator).mark for stage in finished(run)}
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
                     ", inputs={..}" * bool(spec.inputs),
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
