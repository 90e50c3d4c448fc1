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
        run = Path(run)
        if not run.is_dir():
            raise UsageError(f"{run}: there is no such folder; give a run, such as runs/burgers1d, "
                             "or what `python -m ups.simulator` wrote.")
        if (run / "exit.json").exists():
            raise UsageError(f"{run} is one stage of a run; give {run.parent}.")
        self, cuda = cls(), torch.cuda.is_available()
        try:
            self.device = torch.empty(0, device=device or ("cuda" if cuda else "cpu")).device
        except (RuntimeError, AssertionError):
            raise UsageError(f"device={device!r}: there is none; leave it out.") from None
        self.run, self.operator = run, load_operator(run, model)
        self.operator.model.to(self.device)
        self.tasks, cuda = load_tasks(self.operator, self.device), self.device.type == "cuda"
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

    def rollout(self, u0, steps=None, params=None, inputs=None, *, times=None, dt=None,
                accuracy=None, stride=None, task=None, members=None, seed=0, grad=False, out=None):
        """Predict what follows the fields u0 (B, C, *grid): `steps` frames, or those at `times`.
        u0 of an operator with a history of H > 1 frames is (B, H, C, *grid), the last of them now.

        params   {"nu": 0.01}: numbers, or one per row; not needed where the data had one value
        inputs   channels that are given, in physical units: {"vx": (B, *grid)}, or (B, T, *grid) at
                 the beginning of each step of the data
        times    after u0, ascending, or one: multiples of the dt of the training data
        dt       time between two of the frames, one step: one of those of training
        accuracy the nRMSE, mean of these frames, that the cheapest way there may have; without it
                 the most accurate way is taken, both as measured on the validation split
        stride   the longest step in frames, one of those of training: instead of a choice
        task     its name, where the run has several
        members  trajectories to draw: by the generator of the run that scores best on validation,
                 or, where a run has none, by the operator from perturbed inputs
        grad     let gradients reach u0, params and inputs: the result is a tensor
        out      where the result goes: "u.h5", or an array with its shape such as a numpy memmap
        """
        if task is None and len(self.tasks) == 1:
            task, = self.tasks
        if task not in list(self.tasks):
            raise UsageError(f"task={task}: choose one of {', '.join(self.tasks)}.")
        index, task = list(self.tasks).index(task), self.tasks[task]
        for name, value, least in (("steps", steps, 1), ("members", members, 1), ("seed", seed, 0)):
            if value is not None and not (isinstance(value, numbers.Integral)
                                          and least <= value < 2**63):
                raise UsageError(f"{name}={value!r}: it is a whole number, {least} or more.")
        if members and (dt, accuracy, stride) != (None, None, None):
            raise UsageError("members go from frame to frame: leave dt, accuracy and stride out.")
        leads, longest = _plan(task, steps, times, dt, accuracy, stride)
        u, _, _ = rows = _rows(task, leads[-1], u0, params, inputs)
        if grad:
            if members or out is not None:
                raise UsageError("grad=True keeps every step in memory: leave members and out out.")
            return self._predict(index, leads, longest, "float32", *self._here(rows)).to(u.device)
        tokens = math.prod(task.codec.tokens) * (members or 1)
        size = min(len(u), max(1, TOKENS[self.device.type] // tokens))
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
        z, dt = task.encode(u), u.new_full((len(u),), task.facts.dt)
        tokens = None if given is None else task.encode_inputs(given)
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
            facts, best = task.facts, preferred(self.run, name)
            words = [f"channels {', '.join(facts.channels)}",
                     *[f"inputs {', '.join(facts.inputs)}"] * bool(facts.inputs),
                     *(f"{axis} in [{a:g}, {b:g}], {n} points, {kind}" for axis, n, (a, b), kind in
                       zip(facts.axes, facts.grid, facts.domain, facts.boundary, strict=True)),
                     f"dt {facts.dt:g}",
                     *(f"{param} {_list(sorted({scale.low, scale.high}))}" for param, scale in
                       zip(facts.params, facts.scales, strict=True))]
            best = "the operator from perturbed inputs" if best == "operator" else best
            lines += [f"  {name}: {'; '.join(words)}", f"    members are drawn by: {best}"]
        lines.append(f"  precision of the update: {', '.join(sorted({*self.precisions.values()}))}")
        return "\n".join(lines)


def _plan(task, steps, times, dt, accuracy, stride):
    """The frames 1, 2, .. that are asked for, and the longest step to them: ups/rollout.py."""
    plans, unit = task.plans, task.facts.dt
    if (steps is None) == (times is None):
        raise UsageError("give the number of steps, or times=.")
    if sum(value is not None for value in (dt, accuracy, stride)) > 1:
        raise UsageError("give one of dt=, accuracy= and stride=.")
    for name, value in {"dt": dt, "accuracy": accuracy}.items():
        if not isinstance(value, numbers.Real | None):
            raise UsageError(f"{name}={value!r}: it is a number.")
    if dt is not None:
        stride = next((n for n in plans if math.isclose(dt, n * unit, rel_tol=1e-4)), None)
        if stride is None:
            raise UsageError(
                f"dt={dt:g}: this run has learned steps of {_list(n * unit for n in plans)}; leave "
                f"dt out, and ask for frames by times=, multiples of {unit:g}, and for the longest "
                f"step by stride={'|'.join(map(str, plans))}.")
    if stride not in (None, *plans):
        raise UsageError(f"stride={stride!r}: this run has learned steps of "
                         f"{', '.join(map(str, plans))} frames.")
    if times is None:
        every = 1 if dt is None else stride
        leads = [every * step for step in range(1, steps + 1)]
    else:
        times = np.atleast_1d(_numbers("times", times))
        leads = np.maximum(1, np.nan_to_num(times / unit).round())
        for time, lead in zip(times, leads, strict=True):
            if not abs(time / unit - lead) <= 0.01:
                raise UsageError(f"times holds {time:g}, and steps are of {unit:g} from u0 on; the "
                                 f"nearest is {lead * unit:g}.")
        leads = leads.astype(int).tolist()
        if not leads or leads != sorted({*leads}):
            raise UsageError("times are one or more, in ascending order.")
    if accuracy is not None and not all(plans.values()):
        raise UsageError("accuracy= needs the errors of validation, and the run has no "
                         "operator/choices.json with them; leave accuracy out.")
    longest = stride or choose_plan(plans, leads, accuracy)
    if longest is None:
        best = min(plan_error(known, leads) for known in plans.values())
        raise UsageError(f"accuracy={accuracy:g}: no way to these frames is so accurate; the best "
                         f"has {best:.2g} on the validation split.")
    return tuple(leads), longest


@contextlib.contextmanager
def _opened(out, shape, u0):
    """What takes the result row by row; a file is whole, or not there."""
    if isinstance(out, str | Path):
        if Path(out).suffix not in (".h5", ".hdf5"):
            raise UsageError(f"out={str(out)!r} is written as HDF5; give it the ending .h5.")
        partial = Path(f"{out}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
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
        if np.shape(out) != shape:
            raise _shape("out", out, f"this gives {shape}")
        yield out


def _rows(task, steps, u0, params, inputs):
    """What goes in, one row a trajectory: fields u0 (B, C, *grid), the condition (B, P), and the
    given channels (B, T or 1, E, *grid), T >= steps, or None."""
    facts, axes = task.facts, len(task.facts.grid)
    params, inputs = ({} if values is None else values for values in (params, inputs))
    varied = [name for name, scale in zip(facts.params, facts.scales, strict=True)
              if scale.low < scale.high]
    for what, given, needed, known in (("params", params, varied, facts.params),
                                       ("inputs", inputs, facts.inputs, facts.inputs)):
        if not (isinstance(given, dict) and {*needed} <= {*given} <= {*known}):
            told = ", ".join(given) if isinstance(given, dict) else f"of {type(given)}"
            raise UsageError(f"{what} are {told or 'none'}; {task.name} takes "
                             f"{'a dictionary of ' * bool(known)}{', '.join(known) or 'none'}.")

    u, wanted = _tensor("u0", u0), _shape_of(task)
    if u.shape[1:] != wanted or not u.numel():
        raise _shape("u0", u, f"{task.name} here takes (batch, {_list(wanted)}): "
                     f"{'frames, ' * (task.history > 1)}channels {', '.join(facts.channels)}, "
                     f"axes {', '.join(facts.axes)}")
    for name, part, (low, high) in zip(facts.channels, u.unbind(-1 - axes),
                                       task.codec.seen.T.tolist(), strict=True):
        _seen(f"{name} of u0", part, low, high, MARGIN * (high - low))

    columns, fields, batch = [torch.ones(len(u), 0)], [], len(u)
    for name, scale in zip(facts.params, facts.scales, strict=True):
        value = _tensor(f"params[{name!r}]", params.get(name, scale.low)).double().cpu()
        if value.shape not in ((), (batch,)):
            raise _shape(f"params[{name!r}]", value, f"give a number, or {batch} of them, one per "
                         "row of u0")
        if scale.log and (value <= 0).any():
            raise UsageError(f"params[{name!r}] must be positive.")
        _seen(name, value, scale.low, scale.high, 1e-6 * max(abs(scale.low), abs(scale.high)))
        columns.append(value.expand(batch)[:, None])

    for name in facts.inputs:
        given = _tensor(f"inputs[{name!r}]", inputs[name])
        v = given[:, None] if given.ndim == 1 + axes else given  # (B, T or 1, *grid)
        if v.shape[2:] != facts.grid or len(v) not in (1, batch) or 1 != v.shape[1] < steps:
            grid = _list(facts.grid)
            raise _shape(f"inputs[{name!r}]", given, f"each is (batch, {grid}), or at all times "
                         f"(batch, {steps} or more, {grid})")
        _seen(f"inputs[{name!r}]", v)
        fields.append(v[:, :steps])
    fields = torch.stack(torch.broadcast_tensors(*fields), 2) if fields else None
    return (u, task.condition(torch.cat(columns, 1)),
            fields if fields is None else fields.expand(batch, *fields.shape[1:]))


def _tensor(name, values):
    """A tensor, of an array the same memory: it may be a map of a large file."""
    if torch.is_tensor(values) and not values.is_complex():
        return values
    values = _numbers(name, values)
    with warnings.catch_warnings(action="ignore"):  # of a map that is read-only: it is only read
        return torch.as_tensor(values)


def _numbers(name, values):
    """An array of numbers that torch can hold."""
    try:
        values = np.asarray(values)
        if (values.dtype not in (np.float16, np.float32, np.float64)  # whole, of other bytes
                or min(values.strides, default=0) < 0):
            values = values.astype(float, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} holds no real numbers ({error}).") from None
    return values


def _seen(name, values, low=-math.inf, high=math.inf, margin=0.0):
    """Refuse what is no number; warn where training saw nothing alike."""
    least, most = values.detach().amin().item(), values.detach().amax().item()  # copies no map
    if not math.isfinite(least + most):
        raise UsageError(f"{name} holds NaN or Inf.")
    if least < low - margin or most > high + margin:
        warnings.warn(f"{name} is {least:.3g} to {most:.3g}; training saw {low:.3g} to {high:.3g}, "
                      "and what is outside is a guess.", stacklevel=4)


def _shape(name, values, wanted):
    return UsageError(f"{name} has the shape {tuple(np.shape(values))}; {wanted}.")


def _shape_of(task):
    """Of a row of u0."""
    return (*[task.history] * (task.history > 1), len(task.facts.channels), *task.facts.grid)


def _list(values):
    return ", ".join(f"{value:g}" for value in values)


def export(run, out, license=None, model=None):
    """Write `out` as a whole or not at all; it may replace an earlier export, nothing else."""
    run, out = Path(run), Path(out).absolute()
    taken = out.is_file() or out.exists() and any(out.iterdir())
    if taken and read_json(out / "config.json").get("library_name") != "ups":
        raise UsageError(f"{out} was not written by ups.simulator; give a new folder.")
    sim = Simulator.load(run, "cpu", model)  # refuses what does not belong together
    marks = {f"codec/{task.name}": task.fingerprint for task in sim.tasks.values()}
    marks |= {"operator": sim.operator.mark} | {
        stage: load_generator(run, stage, sim.operator).mark for stage in finished(run)}
    try:
        with written(out) as partial:
            _export(sim, marks, partial)
            (partial / "README.md").write_text(card(sim, out.name, license))
            Simulator.load(partial, "cpu", model)  # what will be read is what was written
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); give another "
                         "folder.") from None
    return marks


def _export(sim, marks, folder):
    """The files of the stages `marks`; in configurations no path of this machine."""
    run, systems = sim.run, vars(RunConfig(run="."))
    for stage in marks:
        for path in itertools.chain(*(run.glob(f"{stage}/{file}") for file in FILES)):
            if not path.resolve().is_relative_to(run.resolve()):
                raise UsageError(f"{path} is a link that leaves the run; put the file there.")
            target = folder / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        if settings := read_json(run / stage / "config.json"):
            write_json(folder / stage / "config.json",
                       settings | {key: systems[key] for key in settings if key in systems})
    write_json(folder / "config.json", {"library_name": "ups", "stages": marks})


def card(sim, name, license=None):
    """The model card: front matter of the hub, use, numbers."""
    first, folder = next(iter(sim.tasks.values())), sim.run / "operator"
    given = "".join([", params={..}" * any(s.low < s.high for s in first.facts.scales),
                     ", inputs={..}" * bool(first.facts.inputs),
                     f', task="{first.name}"' * (len(sim.tasks) > 1)])
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
u = sim.rollout(u0, 40{given})  # u0 (batch, {_list(_shape_of(first))})
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
