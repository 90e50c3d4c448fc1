"""A trained run as a simulator: fields in, fields out. It needs the run's folder, but no data.

    sim = Simulator.load("runs/burgers1d")     # or a folder that the last line below has written
    print(sim)                                 # its fields, parameters and time step
    u = sim.rollout(u0, 40)                    # (B, C, *grid) -> (B, 40, C, *grid)

    python -m ups.simulator runs/burgers1d OUT # export: ups/export.py

u0 -> z0 -> z1_hat -> z2_hat -> .. stays in latent space; only what is asked for is decoded. The
result is (B, T, C, *grid), with `members` (B, M, T, C, *grid). Numpy in, numpy out; torch in, torch
out, on the device of u0. Rows go through in batches that fit, from a memory map into a file if you
like.
"""

import contextlib
import functools
import math
from pathlib import Path

import h5py
import numpy as np
import torch
from tqdm import tqdm

from ups.arguments import FEWER, check_whole, listed, plan_of, rows_of, wrong_shape
from ups.config import UsageError, command
from ups.eval.ensemble import member_noise, roll_out_members
from ups.latents import load_tasks
from ups.memory import require_memory
from ups.models.layers import compiled
from ups.models.precision import PRODUCTS, lowered, products
from ups.rollout import roll_out, within
from ups.stages import load_generator, load_operator, preferred
from ups.train.step import CudaGraphed, is_out_of_memory

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
        self.compiled, self.static = compile, {}  # key -> where a graph finds its rows
        self.graphs = CudaGraphed(lambda key: self._predict(*key[:4], *self.static[key]), cuda)
        if compile:
            for one in self.models.values():
                compiled(one)
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
        check_whole(1, steps=steps, members=members)
        check_whole(0, seed=seed)
        if members and (dt, accuracy, stride) != (None, None, None):
            raise UsageError("members go from frame to frame: leave dt, accuracy and stride out.")
        leads, longest = plan_of(task, steps, times, dt, accuracy, stride)
        u, _, _ = rows = rows_of(task, leads[-1], u0, params, inputs)
        if grad:
            if members or out is not None:
                raise UsageError("grad=True keeps every step in memory: leave members and out out.")
            return self._predict(index, leads, longest, "float32", *self._here(rows)).to(u.device)
        tokens = math.prod(task.codec.tokens) * (members or 1)
        size = min(len(u), max(1, TOKENS[self.device.type] // tokens))
        shape = (len(u), *([members] if members else []), len(leads), len(task.facts.channels),
                 *task.facts.grid)
        if u.device.type == "cpu":  # frames of a row and their stack, and the result
            require_memory(8 * math.prod(shape[1:]) + 4 * math.prod(shape) * (out is None),
                           f"a result of the shape {shape}",
                           FEWER + ", or write them into a file: out='u.h5'" * (out is None))
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
        """`_predict`, with `compile` of batches of `size` rows alone, on CUDA as a graph."""
        if not self.compiled:
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
                     *(f"{param} {listed(sorted({scale.low, scale.high}))}" for param, scale in
                       zip(facts.params, facts.scales, strict=True))]
            best = "the operator from perturbed inputs" if best == "operator" else best
            lines += [f"  {name}: {'; '.join(words)}", f"    members are drawn by: {best}"]
        lines.append(f"  precision of the update: {', '.join(sorted({*self.precisions.values()}))}")
        return "\n".join(lines)


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
            raise wrong_shape("out", out, f"this gives {shape}")
        if not (out.is_floating_point() if torch.is_tensor(out) else out.dtype.kind == "f"):
            raise UsageError(f"out holds {out.dtype}; give it float32, as the result has.")
        yield out


if __name__ == "__main__":
    from ups.export import main  # which reads this module

    command(main)
