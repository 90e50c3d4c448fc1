"""Solve and write: the tasks that have a bundled solver, and solvers in a Python file of the user.

Sample `i` is drawn in chunk `i // chunk` from a generator seeded by (seed, chunk): it depends
neither on the number of samples nor on that of processes. Bundled solvers draw on the CPU and
before they look at the PDE parameters, so files of a family share initial conditions by index.
The settings of a file are kept in its attribute `ups`, by which a second run knows that there is
nothing left to do.
"""

import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import h5py
import numpy as np
import torch
import yaml
from tqdm import tqdm

from ups.config import RunError, UsageError
from ups.data.pdebench import TASKS
from ups.data.solvers import SOLVERS
from ups.data.stochastic import make_stochastic
from ups.data.stores import HDF5
from ups.data.write import new_file, write_fields
from ups.files import sha256

# What our own incompressible files say beside nu; the published ones have walls and a unit square.
NS2D = {"boundary": "periodic", "domain": [[0.0, 2 * np.pi]] * 2}


def make(task, preset=None, out="data", device=None, seed=0, **changes):
    """Write one file per combination of parameter values; return their paths.

    `task` is that of a bundled solver, or a Python file with a solver.
    """
    if task.endswith(".py"):
        changes |= {"preset": preset} if preset else {}
        return [_make_own(Path(task), Path(out), _device(device), seed, changes)]
    preset = preset or "small"
    if task not in SOLVERS:
        raise UsageError(f"there is no solver for {task}; there are {', '.join(SOLVERS)}, and any "
                         "file.py with one.")
    if task == "ns2d" and changes.pop("forcing", "constant") == "stochastic":
        return make_stochastic(out, _device(device), seed=seed, **changes)
    solver, out = SOLVERS[task], Path(out)
    if preset not in solver.PRESETS:
        raise UsageError(f"there is no preset {preset}; there are {', '.join(solver.PRESETS)}.")
    settings = solver.PARAMS | solver.PRESETS[preset] | {"task": task, "seed": seed}
    _check(task, changes, settings.keys() - {"task", "seed"},
           {"samples": 1, "grid": getattr(solver, "LEAST_GRID", 8), "frames": 2, "chunk": 1})
    for key in changes.keys() & {"t_end", *solver.PARAMS}:
        for value in np.atleast_1d(changes[key]).tolist():
            if not 0 < value < math.inf:
                raise UsageError(f"--{key} {value:g}: it must be finite and above 0.")
    values = {key: np.atleast_1d(changes.pop(key, settings[key])).tolist() for key in solver.PARAMS}
    paths, device = [], _device(device)
    for combination in itertools.product(*values.values()):
        job = settings | changes | dict(zip(values, map(float, combination), strict=True))
        paths.append(out / _name(job, solver))
        if not _complete(paths[-1], job):
            _write(paths[-1], job, solver, device)
    return paths


def _check(task, changes, known, least):
    if wrong := changes.keys() - known:
        raise UsageError(f"{task} has no setting {min(wrong)}; it has {', '.join(sorted(known))}.")
    for key in changes.keys() & least.keys():
        if changes[key] < least[key]:
            raise UsageError(f"--{key} {changes[key]} is too small; {least[key]} is the least.")


def _name(job, solver):
    """The published name; parameters that it leaves out are added where they are not published."""
    pattern = TASKS[job["task"]].file
    extra = "".join(f"_{key}{job[key]}" for key, value in solver.PARAMS.items()
                    if f"{{{key}}}" not in pattern and job[key] != value)
    name = Path(pattern.format(**job))
    return name.with_name(name.name.removesuffix(name.suffix) + extra + name.suffix)


def _complete(path, job):
    """True where the file is there with these settings; with others it is never overwritten."""
    if not path.exists():
        return False
    try:
        with h5py.File(path) as f:
            there = json.loads(f.attrs.get("ups", "{}"))
    except (OSError, ValueError):
        there = {}
    if there == job:
        print(f"{path} is complete.")
        return True
    differ = [f"{key}={there[key]}" for key in job if key in there and there[key] != job[key]]
    if not differ:
        raise UsageError(f"{path} is there and not ours; `python -m ups.data inspect` says what it "
                         "holds. Remove it, or choose another folder.")
    raise UsageError(f"{path} is there with other settings ({', '.join(differ)}); remove it or "
                     "choose another --out.")


def _write(path, job, solver, device):
    facts = TASKS[job["task"]].facts
    size = 4 * job["samples"] * job.get("frames", 1) * job["grid"] ** len(facts.axes) * len(
        (*facts.channels, *facts.inputs))
    if size > (free := shutil.disk_usage(next(filter(Path.exists, path.absolute().parents))).free):
        raise UsageError(f"{path} needs {size / 1e9:.3g} GB, but {free / 1e9:.3g} GB are free; "
                         "give fewer --samples, or another --out.")
    with new_file(path) as f, tqdm(total=job["samples"], unit=" samples", desc=path.name) as bar:
        _create(f, job, {key: job[key] for key in solver.PARAMS})
        written = 0
        for u, force in solved(job, solver, device):
            if not np.isfinite(u).all():
                raise UsageError(f"{path.name}: the solution is not finite after sample {written}; "
                                 "nothing is kept, change its parameters.")
            _fill(f, job, slice(written, written + len(u)), u, force)
            written += len(u)
            bar.update(len(u))
        assert written == job["samples"], f"{written} of {job['samples']} samples were solved"
        f.attrs["ups"] = json.dumps(job, sort_keys=True)


def solved(job, solver, device):
    """Yield u (n, T, C, *grid), chunk by chunk, and the force (2, *grid) where there is one."""
    params = {key: job[key] for key in solver.PARAMS}
    for start in range(0, job["samples"], job["chunk"]):
        generator = torch.Generator().manual_seed(_seed(job["seed"], start // job["chunk"]))
        u0 = solver.initial(job["chunk"], job["grid"], generator)  # (n, C, *grid)
        u0 = u0[:job["samples"] - start].to(device)
        if "target" in job:  # steady: one frame (a, u)
            u = solver.solve(u0, target=job["target"], generator=generator, **params)
            u = torch.cat([u0, u], 1)[:, None]
        else:
            u = solver.solve(u0, job["t_end"], job["frames"], **params)
        force = solver.force(job["grid"]).numpy() if hasattr(solver, "force") else None
        yield u.cpu().numpy(), force


def _seed(seed, chunk):
    return int.from_bytes(hashlib.sha256(f"{seed}/{chunk}".encode()).digest()[:7])


def _create(f, job, params):
    """Prepare an empty file of a layout: data sets of the final shape, coordinates, attributes."""
    task, samples, n, frames = TASKS[job["task"]], job["samples"], job["grid"], job.get("frames")
    axes, (lo, hi) = task.facts.axes, task.domain
    grid, x = (n,) * len(axes), (lo + (np.arange(n) + 0.5) * (hi - lo) / n).astype(np.float32)
    t = np.linspace(0, job.get("t_end", 1.0), frames or 2, dtype=np.float32)
    if task.layout in ("flat", "steady"):
        f.attrs.update({"Nu" if key == "nu" else key: value for key, value in params.items()})
        f.update({f"{axis}-coordinate": x for axis in axes})
    if task.layout == "flat":
        f["t-coordinate"] = np.append(t, 2 * t[-1] - t[-2])  # one more than frames, as published
        f.create_dataset("tensor", (samples, frames, *grid), "f4")
    elif task.layout == "steady":
        f.attrs["target"] = job["target"]
        f.create_dataset("nu", (samples, *grid), "f4")
        f.create_dataset("tensor", (samples, 1, *grid), "f4")
    elif task.layout == "last":
        f.attrs["config"] = yaml.safe_dump(params | NS2D)
        f["t"] = np.tile(t, (samples, 1))
        f.create_dataset("velocity", (samples, frames, *grid, 2), "f4")
        f.create_dataset("force", (samples, *grid, 2), "f4")
    else:
        for row in range(samples):
            group = f.create_group(f"{row:04d}")
            group.attrs["config"] = yaml.safe_dump({"sim": params})
            group.create_dataset("data", (frames, *grid, len(task.facts.channels)), "f4")
            group.update({f"grid/{axis}": x for axis in axes} | {"grid/t": t})


def _fill(f, job, rows, u, force):
    """Store u (n, T, C, *grid) as the samples `rows`."""
    layout = TASKS[job["task"]].layout
    if layout == "flat":
        f["tensor"][rows] = u[:, :, 0]
    elif layout == "steady":
        f["nu"][rows], f["tensor"][rows] = u[:, 0, 0], u[:, :, 1]
    elif layout == "last":
        f["velocity"][rows], f["force"][rows] = np.moveaxis(u, 2, -1), np.moveaxis(force, 0, -1)
    else:
        for row, one in enumerate(u, rows.start):
            f[f"{row:04d}/data"][...] = np.moveaxis(one, 1, -1)


def _device(name):
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UsageError(f"--device {name} is not here; take cpu or leave it out.") from None
    return device


def _make_own(source, out, device, seed, changes):
    """Write what `solve(generator, n)` of a Python file returns; its FACTS go to `write_fields`.

    A file that imports torch gets a torch.Generator on the device and runs here; any other gets
    one of numpy, in as many processes as there are cores.
    """
    _check(source, changes, {"samples", "chunk"}, {"samples": 1, "chunk": 1})
    path = out if out.suffix in HDF5 else out / f"{source.stem}.h5"
    facts = getattr(_load(source), "FACTS", {})
    own = re.search(r"^\s*(import|from)\s+torch\b", source.read_text(), re.M)
    job = {"samples": 100, "chunk": 64 if own else 8} | changes | {
        "seed": seed, "solver": sha256(source)}
    if _complete(path, job):
        return path
    chunks = range(-(-job["samples"] // job["chunk"]))
    solve = functools.partial(_solve_own, source, job, device if own else None)
    try:
        if own:
            write_fields(path, _finite(map(solve, chunks), path, job), made=job, **facts)
        else:
            cores = min(len(chunks), len(os.sched_getaffinity(0)))
            with ProcessPoolExecutor(cores) as pool:
                parts = _in_order(pool, solve, chunks, 2 * cores)
                write_fields(path, _finite(parts, path, job), made=job, **facts)
    except BrokenProcessPool:
        raise RunError(f"{source}: a process that solves was killed, perhaps for want of memory; "
                       "give a smaller --chunk.") from None
    return path


@functools.cache
def _load(source):
    if not source.is_file():
        raise UsageError(f"there is no file {source}.")
    spec = importlib.util.spec_from_file_location(source.stem, source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "solve", None)):
        raise UsageError(f"{source} has no function solve(generator, n).")
    return module


def _solve_own(source, job, device, chunk):
    """The trajectories of a chunk, each with its own parameters."""
    seed = _seed(job["seed"], chunk)
    generator = (torch.Generator(device).manual_seed(seed) if device else
                 np.random.default_rng(seed))
    u = _load(source).solve(generator, job["chunk"])  # whole, however few are taken
    u, params = u if isinstance(u, tuple) else (u, {})
    u, params = _numpy(u), {name: _numpy(value) for name, value in params.items()}
    if len(u) != job["chunk"]:
        raise UsageError(f"{source}: solve(generator, {job['chunk']}) returned {len(u)} "
                         "trajectories.")
    params = {name: np.broadcast_to(value, len(u)) for name, value in params.items()}
    count = min(len(u), job["samples"] - chunk * len(u))
    return [(u[i], {name: value[i] for name, value in params.items()}) for i in range(count)]


def _numpy(value):
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _in_order(pool, solve, chunks, most):
    """Results in order, of which no more than `most` wait in memory."""
    waiting = deque()
    for chunk in chunks:
        waiting.append(pool.submit(solve, chunk))
        if len(waiting) == most:
            yield waiting.popleft().result()
    yield from (future.result() for future in waiting)


def _finite(parts, path, job):
    rows = tqdm(itertools.chain.from_iterable(parts), total=job["samples"], unit=" samples",
                desc=path.name)
    for row, (u, params) in enumerate(rows):
        if not np.isfinite(u).all():
            raise UsageError(f"{path.name}: sample {row} is not finite; nothing is kept, mend the "
                             "solver.")
        yield u, params
