"""Solve and write: tasks with a bundled solver, stochastic ns2d, and solvers in a user's own file.

Sample `i` is drawn in chunk `i // chunk` from a generator seeded by (seed, chunk): it depends
neither on the number of samples nor on that of processes. Bundled solvers draw on the CPU and
before they look at the PDE parameters, so files of a family share initial conditions by index.
A file keeps its settings in the attribute `ups`, by which a second run knows that it is complete.
"""

import hashlib
import inspect
import itertools
import json
import math
import os
import re
import runpy
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import h5py
import numpy as np
import torch
import yaml
from tqdm import tqdm

from ups.config import UsageError
from ups.data import stochastic
from ups.data.pdebench import TASKS, stored
from ups.data.solvers import SOLVERS
from ups.data.stores import HDF5
from ups.data.write import new_file, write_fields
from ups.files import sha256

LEAST = {"samples": 1, "grid": 16, "frames": 2, "chunk": 1}  # of others: above 0
# What our own incompressible files say beside nu; the published ones have walls and a unit square.
NS2D = {"boundary": "periodic", "domain": [[0.0, 2 * np.pi]] * 2}


def make(task, out="data", device=None, seed=0, **changes):
    """Write one file per combination of parameter values; return their paths.

    `task` is that of a bundled solver, or a Python file with a solver.
    """
    out = Path(out)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if task.endswith(".py"):
        path = out if out.suffix in HDF5 else out / f"{Path(task).stem}.h5"
        return [_make_own(Path(task), path, device, changes, seed)]
    if task == "ns2d" and changes.pop("forcing", "constant") == "stochastic":
        return _make_stochastic(out, device, changes, seed)
    solver, preset = SOLVERS.get(task), changes.pop("preset", "small")
    if not solver or preset not in solver.PRESETS:
        there = ", ".join(solver.PRESETS if solver else SOLVERS)
        raise UsageError(f"there is no preset {preset}; there are {there}." if solver else
                         f"there is no solver for {task}; there are {there}, and any file.py "
                         "with one.")
    settings = _changed(task, solver.PARAMS | solver.PRESETS[preset], changes)
    paths, values = [], [np.atleast_1d(settings[key]).tolist() for key in solver.PARAMS]
    for combination in itertools.product(*values):
        params = dict(zip(solver.PARAMS, map(float, combination), strict=True))
        job = settings | params | {"task": task, "seed": seed}
        paths.append(out / _name(task, params))
        if not _complete(paths[-1], job):
            _write_published(paths[-1], job, params, _solved(job, params, device))
    return paths


def _make_own(source, path, device, changes, seed):
    """Write what `solve(generator, n)` of a Python file returns; its FACTS go to `write_fields`.

    A file that imports torch gets a torch.Generator on the device and runs here; any other gets
    one of numpy, in as many processes as there are cores. Arguments of `solve` that have a default
    are settings.
    """
    known, here = _load(source), re.search(r"^\s*(import|from)\s+torch\b", source.read_text(), re.M)
    settings = {name: one.default for name, one in inspect.signature(
        known["solve"]).parameters.items() if one.default is not one.empty}
    changes = {key: one[0] if np.ndim(one) else one for key, one in changes.items()}
    job = _changed(source, {"samples": 100, "chunk": 64 if here else 8} | settings, changes)
    job |= {"seed": seed, "solver": sha256(source)}
    if not _complete(path, job):
        solve = partial(_solve_own, source, job, {key: job[key] for key in settings},
                        device if here else None)
        chunks = range(-(-job["samples"] // job["chunk"]))
        parts = map(solve, chunks) if here else _in_processes(solve, chunks)
        rows = ((one, {name: value[i] for name, value in params.items()})
                for u, params in _watched(parts, path, job) for i, one in enumerate(u))
        write_fields(path, rows, made=job, **known.get("FACTS", {}))
    return path


def _make_stochastic(out, device, changes, seed):
    path, truth = (out / f"ns2d_stochastic{end}" for end in (".h5", ".truth"))
    members = changes.pop("truth", 0)
    _make_own(Path(stochastic.__file__), path, device, {"samples": 256} | changes, seed)
    with h5py.File(path) as f:
        job = json.loads(f.attrs["ups"]) | {"truth": members}
    if members and not _complete(truth, job):
        stochastic.write_truth(truth, path, job, partial(_generator, seed, device=device))
    return [path, truth] if members else [path]


def _changed(task, known, changes):
    """The settings `known` with `changes`, which are settings too, and in their range."""
    for key, value in changes.items():
        if key not in known:
            raise UsageError(f"{task} has no setting {key}; it has {', '.join(sorted(known))}.")
        for one in np.atleast_1d(value).tolist() if key != "target" else ():
            if not max(0, LEAST.get(key, 0)) <= one < math.inf or not one:
                raise UsageError(f"--{key} {one:g} is out of range; it must be finite and "
                                 f"{f'at least {LEAST[key]}' if key in LEAST else 'above 0'}.")
    return known | changes


def _name(task, params):
    """The published name; parameters that it leaves out are added where they are not published."""
    pattern = TASKS[task].file
    extra = "".join(f"_{key}{value}" for key, value in params.items()
                    if f"{{{key}}}" not in pattern and value != SOLVERS[task].PARAMS[key])
    name = Path(pattern.format(**params))
    return name.with_name(name.stem + extra + name.suffix)


def _complete(path, job):
    """True where the file is there with these settings; with others it is never overwritten."""
    if not path.exists():
        return False
    try:
        with h5py.File(path) as f:
            there = json.loads(f.attrs["ups"])
    except (OSError, KeyError, ValueError):
        there = {}
    if there == job:
        print(f"{path} is complete.")
        return True
    differ = ", ".join(f"{key}={there[key]}" for key in job if there.get(key, job[key]) != job[key])
    raise UsageError(f"{path} is there "
                     f"{f'with other settings ({differ})' if differ else 'and not ours'}; remove "
                     "it or choose another --out.")


def _watched(parts, path, job):
    """The same parts (u (n, T, C, *grid), parameters), with a bar, each of them finite."""
    with tqdm(total=job["samples"], unit=" samples", desc=path.name) as bar:
        for u, params in parts:
            if not np.isfinite(u).all():
                raise UsageError(f"{path.name}: a solution is not finite; nothing is "
                                 "kept: change the parameters, or mend the solver.")
            yield u, params
            bar.update(len(u))


# bundled solvers

def _solved(job, params, device):
    """Yield u (n, T, C, *grid), chunk by chunk; of a steady task one frame, inputs first."""
    solver = SOLVERS[job["task"]]
    for start in range(0, job["samples"], job["chunk"]):
        generator = _generator(job["seed"], start // job["chunk"])
        u0 = solver.initial(job["chunk"], job["grid"], generator)  # (n, C, *grid)
        u0 = u0[:job["samples"] - start].to(device)
        if "frames" in job:
            u = solver.solve(u0, job["t_end"], job["frames"], **params)
        else:
            u = solver.solve(u0, target=job["target"], generator=generator, **params)
            u = torch.cat([u0, u], 1)[:, None]
        yield u.cpu().numpy(), {}


def _write_published(path, job, params, parts):
    """Write a published layout: arrays, coordinates, attributes."""
    task, n, frames = TASKS[job["task"]], job["grid"], job.get("frames", 2)
    space, channels, (lo, hi) = task.facts.axes, task.facts.channels, task.facts.domain[0]
    sizes = {"sample": job["samples"], "row": 1, "time": frames, "channel": len(channels)}
    sizes |= dict.fromkeys(space, n)
    x = (lo + (np.arange(n) + 0.5) * (hi - lo) / n).astype(np.float32)
    t = np.linspace(0, job.get("t_end", 1.0), frames, dtype=np.float32)
    places = stored(task, ())
    with new_file(path) as f:
        if task.layout in ("flat", "steady"):
            f.attrs.update({"Nu" if key == "nu" else key: value for key, value in params.items()})
            f.update({f"{axis}-coordinate": x for axis in space})
        if task.layout == "flat":
            f["t-coordinate"] = np.append(t, 2 * t[-1] - t[-2])  # one more than frames
        if task.layout == "last":
            f.attrs["config"] = yaml.safe_dump(params | NS2D)
            f["t"] = np.tile(t, (job["samples"], 1))
        groups = [f.create_group(f"{row:04d}") for row in range(job["samples"])
                  if task.layout == "groups"]
        for group in groups:
            group.attrs["config"] = yaml.safe_dump({"sim": params})
            group.update({f"grid/{axis}": x for axis in space} | {"grid/t": t})
        for key, axes in {place[:2] for place in places.values()}:
            for group in groups or [f]:
                group.create_dataset(key, [sizes[axis] for axis in axes], "f4")
        row = 0
        for u, _ in _watched(parts, path, job):
            for c, name in enumerate((*task.facts.inputs, *channels)):
                key, axes, k = places[name]
                value = u[:, 0, c] if axes == ("sample", *space) else u[:, :, c]
                last = (k,) if axes[-1] == "channel" else ()
                if groups:
                    for group, one in zip(groups[row:], value, strict=False):
                        group[key][(..., *last)] = one
                else:
                    f[key][(slice(row, row + len(u)), ..., *last)] = value
            row += len(u)
        f.attrs["ups"] = json.dumps(job, sort_keys=True)


# solvers of the user

@cache
def _load(source):
    if not source.is_file():
        raise UsageError(f"there is no file {source}.")
    known = runpy.run_path(str(source))
    if not callable(known.get("solve")):
        raise UsageError(f"{source} has no function solve(generator, n).")
    return known


def _solve_own(source, job, settings, device, chunk):
    """The trajectories of a chunk and {name: (n,)} of their parameters."""
    generator, many = _generator(job["seed"], chunk, device), job["chunk"]
    u = _load(source)["solve"](generator, many, **settings)  # whole, however few are taken
    u, params = u if isinstance(u, tuple) else (u, {})
    if len(u) != many:
        raise UsageError(f"{source}: solve(generator, {many}) returned {len(u)} trajectories.")
    few = min(many, job["samples"] - chunk * many)
    return _numpy(u)[:few], {name: np.broadcast_to(_numpy(value), many)[:few]
                             for name, value in params.items()}


def _in_processes(solve, chunks):
    cores = min(len(chunks), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(cores) as pool:
        for k in range(0, len(chunks), 2 * cores):  # so many wait in memory at most
            yield from pool.map(solve, chunks[k:k + 2 * cores])


def _numpy(value):
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _generator(seed, part, device="cpu"):
    """Of torch on the device, of numpy where that is None."""
    seed = int.from_bytes(hashlib.sha256(f"{seed}/{part}".encode()).digest()[:7])
    return torch.Generator(device).manual_seed(seed) if device else np.random.default_rng(seed)
