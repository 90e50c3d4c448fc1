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
import itertools
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
from ups.latents import load_tasks
from ups.models.precision import PRODUCTS, lowered, products
from ups.rollout import choose_plan, plan_error, roll_out, within
from ups.stages import finished, load_class, load_generator, load_operator, preferred
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
        if (run / "exit.json").exists():
            raise UsageError(f"{run} is one stage of a run; give {run.parent}.")
        self.run, self.operator = run, load_operator(run, model)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.operator.model.to(self.device)
        self.tasks, cuda = load_tasks(run, self.operator, self.device), self.device.type == "cuda"
        choices = self.operator.choices if cuda else {}
        self.precisions = {name: precision or choices.get(name, {}).get("precision", "float32")
                           for name in self.tasks}
        self.models = {name: lowered(self.operator.model, name)
                       for name in {"float32", *self.precisions.values()}}
        self.graphs, self.static = None, {}
        if compile:
            for one in self.models.values():
                one.compile(dynamic=False)
        if compile and cuda:
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
        asked = {"steps": steps, "members": members, "batch": batch}
        asked = {name: value for name, value in asked.items() if value is not None}
        for name, value in (asked | {"seed": seed}).items():
            least = 0 if name == "seed" else 1
            if not isinstance(value, numbers.Integral) or value < least:
                raise UsageError(f"{name}={value!r}: it is a whole number, {least} or more.")
        leads = _leads(steps, times, task.facts)
        longest = _plan(task.plans, leads, accuracy, stride)
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
        shape = (len(u), *([members] if members else []), len(leads), len(task.facts.channels),
                 *task.facts.grid)
        start = 0
        with (torch.inference_mode(), products("highest"), _opened(out, shape, u0) as result,
              tqdm(total=len(u), unit="row", disable=size == len(u)) as bar):
            while start < len(u):
                chosen = slice(start, start + size)
                part = self._here([x if x is None else x[chosen] for x in rows])
                try:
                    if members:
                        noise = functools.partial(member_noise, seed, range(len(u))[chosen],
                                                  members, self.device)
                        frames = self._predict(index, leads, longest, "float32", *part, noise)
                    else:
                        key = index, leads, longest, self.precisions[task.name], size
                        frames = self._replay(key, part)
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

    def _predict(self, index, leads, longest, precision, u, cond, given, noise=None):
        """The frames (B, T, C, *grid) at the steps `leads`, by the plan `longest`; with noise(step,
        count) the members' (B, M, T, C, *grid)."""
        task = list(self.tasks.values())[index]
        z, tokens, dt = task.encode(u), None, u.new_full((len(u),), task.facts.dt)
        if given is not None:
            tokens = task.codec.encode_inputs(given.flatten(0, 1)).unflatten(0, given.shape[:2])
        with products(PRODUCTS[precision]):
            if noise:
                steps = enumerate(roll_out_members(
                    self.generator(task.name), z, leads[-1], dt, cond, index, noise,
                    task.noise_scale.to(z), tokens), start=1)
            else:
                steps = roll_out(self.models[precision], z, dt, cond, index, leads,
                                 within(task.plans, longest), tokens)
            frames = {lead: task.decode(z) for lead, z in steps if lead in leads}
        return torch.stack([frames[lead] for lead in leads], 2 if noise else 1)

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

    @functools.cache  # noqa: B019
    def generator(self, name):
        """What draws members of a task."""
        stage = preferred(self.run, name)
        generator = load_generator(self.run, stage, self.operator).model
        return generator.to(self.device) if isinstance(generator, torch.nn.Module) else generator

    def __repr__(self):
        lines = [f"Simulator of {self.run} on {self.device}"]
        for name, task in self.tasks.items():
            spec, best = task.facts, preferred(self.run, name)
            words = [f"channels {', '.join(spec.channels)}",
                     *([f"inputs {', '.join(spec.inputs)}"] if spec.inputs else [])]
            for axis, n, (a, b), kind in zip(spec.axes, spec.grid, spec.domain, spec.boundary,
                                             strict=True):
                words.append(f"{axis} in [{a:g}, {b:g}], {n} points, {kind}")
            words += [f"dt {spec.dt:g}", *(f"{param} {_list(sorted({scale.low, scale.high}))}"
                                           for param, scale in zip(spec.params, spec.scales,
                                                                   strict=True))]
            best = "the operator from perturbed inputs" if best == "operator" else best
            lines += [f"  {name}: {'; '.join(words)}", f"    members are drawn by: {best}"]
        lines.append(f"  precision of the update: {', '.join(sorted({*self.precisions.values()}))}")
        return "\n".join(lines)


def _leads(steps, times, facts):
    """The steps 1, 2, .. whose frames are asked for."""
    if (steps is None) == (times is None):
        raise UsageError("give the number of steps, or times=.")
    if times is None:
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
    if isinstance(out, str | Path):
        if Path(out).suffix not in (".h5", ".hdf5"):
            raise UsageError(f"out={str(out)!r} is written as HDF5; give it the ending .h5.")
        partial = Path(f"{out}.partial")
        try:
            with h5py.File(partial, "w") as file:
                yield file.create_dataset("u", shape, "float32")
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
    elif out is None:
        yield (torch.empty(shape, device=u0.device) if torch.is_tensor(u0)
               else np.empty(shape, np.float32))
    else:
        if tuple(out.shape) != shape:
            raise _shape("out", out, f"this gives {shape}")
        yield out


def _tensor(values):
    with warnings.catch_warnings(action="ignore"):  # of a map that is read-only: it is only read
        values = torch.as_tensor(values.copy() if _flipped(values) else values)
    if values.is_complex():
        raise UsageError("fields are complex; give their real and imaginary parts as channels.")
    return values


def _flipped(values):
    return isinstance(values, np.ndarray) and min(values.strides, default=0) < 0


def _shape(name, values, wanted):
    return UsageError(f"{name} has the shape {tuple(values.shape)}; {wanted}.")


def _fields(u0, task):
    """u0 as a tensor of the right shape, finite; warns where training saw nothing alike."""
    u, facts, axes = _tensor(u0), task.facts, len(task.facts.grid)
    wanted = *([task.history] if task.history > 1 else []), len(facts.channels), *facts.grid
    if u.shape[1:] != wanted or not u.numel():
        raise _shape("u0", u, f"{task.name} here takes (batch, {_list(wanted)}): "
                     f"{'frames, ' * (task.history > 1)}channels {', '.join(facts.channels)}, "
                     f"axes {', '.join(facts.axes)}")
    rest = [axis for axis in range(u.ndim) if axis != u.ndim - axes - 1]
    ends = torch.stack([u.detach().amin(rest), u.detach().amax(rest)])  # copies no map
    if not ends.isfinite().all():
        raise UsageError("u0 holds NaN or Inf.")
    for name, a, b, low, high in zip(facts.channels, *ends.tolist(), *task.codec.seen.tolist(),
                                     strict=True):
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
    if not names:
        return None
    parts, grid = [], _list(facts.grid)
    for name in facts.inputs:
        given = _tensor(inputs[name])
        v = given[:, None] if given.ndim == 1 + len(facts.grid) else given  # (B, T or 1, *grid)
        if v.shape[2:] != facts.grid or len(v) not in (1, batch) or 1 != v.shape[1] < steps:
            raise _shape(f"inputs[{name!r}]", given, f"each is (batch, {grid}), or at all times "
                         f"(batch, {steps} or more, {grid})")
        if not torch.stack(v.detach().aminmax()).isfinite().all():
            raise UsageError("inputs hold NaN or Inf.")
        parts.append(v[:, :steps])
    v = torch.stack(torch.broadcast_tensors(*parts), 2)
    return v.expand(batch, *v.shape[1:])


def _condition(given, task, batch):
    """PDE parameters as the operator wants them, (B, P)."""
    names, columns = task.facts.params, []
    if not isinstance(given, dict):
        raise UsageError(f"params is a dictionary such as {{{names[0]!r}: 0.1}}." if names else
                         f"{task.name} has no parameters; leave params out.")
    if wrong := [name for name in given if name not in names]:
        raise UsageError(f"{task.name} has no parameter {wrong[0]}; it has "
                         f"{', '.join(names) or 'none'}.")
    for name, scale in zip(names, task.facts.scales, strict=True):
        seen = f"{scale.low:g} to {scale.high:g}"
        if name not in given and scale.low < scale.high:
            raise UsageError(f"params lacks {name}; the data had {seen}.")
        value = torch.as_tensor(given.get(name, scale.low), dtype=torch.float64).cpu()
        if value.shape not in ((), (batch,)):
            raise _shape(f"params[{name!r}]", value, f"give a number, or {batch} of them, one per "
                         "row of u0")
        if not value.isfinite().all() or scale.log and (value <= 0).any():
            raise UsageError(f"params[{name!r}] holds NaN, Inf, or what has no logarithm.")
        slack = 1e-6 * max(abs(scale.low), abs(scale.high))
        if value.min() < scale.low - slack or value.max() > scale.high + slack:
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
    systems = vars(RunConfig(run="."))  # in place of the paths of this machine
    with written(out) as partial:
        for stage in marks:
            for path in itertools.chain(*(run.glob(f"{stage}/{file}") for file in FILES)):
                if not path.resolve().is_relative_to(run.resolve()):
                    raise UsageError(f"{path} is a link that leaves the run; put the file there.")
                target = partial / path.relative_to(run)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            if settings := read_json(run / stage / "config.json"):
                write_json(partial / stage / "config.json",
                           settings | {key: systems[key] for key in settings if key in systems})
        write_json(partial / "config.json", {"library_name": "ups", "stages": marks})
        (partial / "README.md").write_text(card(sim, out.name, license))
        Simulator.load(partial, "cpu", model)  # what will be read is what was written
    return marks


def card(sim, name, license=None):
    """The model card: front matter of the hub, use, numbers."""
    facts, folder = next(iter(sim.tasks.values())).facts, sim.run / "operator"
    given = "".join([", params={..}" * any(s.low < s.high for s in facts.scales),
                     ", inputs={..}" * bool(facts.inputs),
                     f', task="{facts.name}"' * (len(sim.tasks) > 1)])
    frames = _list([*[sim.operator.history] * (sim.operator.history > 1), len(facts.channels),
                    *facts.grid])
    rows = [f"| {task} | {result['nrmse_rollout']['operator']:.3g} "
            f"| {result['nrmse_rollout']['persistence']:.3g} |"
            for task, result in read_json(folder / "test.json").get("tasks", {}).items()]
    rows += [f"\n![roll-out](operator/{path.name})" for path in sorted(folder.glob("rollout*.png"))]
    return f"""---
library_name: ups
{f"license: {license}" if license else "# license: none is given"}
tags: [pde, surrogate, neural-operator, {", ".join(sim.tasks)}]
---
# {name}

A latent simulator for partial differential equations, trained with UPS.

```python
from ups import Simulator

sim = Simulator.load("{name}")  # this folder
u = sim.rollout(u0, 40{given})  # u0 (batch, {frames})
```

```
{str(sim).replace(f" of {sim.run} on {sim.device}", "")}
```

| nRMSE on the test split, all steps | operator | persistence |
|---|---|---|
""" + "\n".join([*rows, ""])


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
