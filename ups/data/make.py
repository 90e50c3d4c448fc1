"""Solve and write: the files of the seven tasks that have a solver, in the published layouts.

Sample `i` is drawn in chunk `i // chunk` from a generator seeded by (seed, chunk), on the CPU: it
does not depend on the PDE parameters, so files of a family share initial conditions by index.
A file is written under a temporary name and renamed when it is complete; its settings are kept in
the attribute `ups`, by which a second run knows that there is nothing left to do.
"""

import hashlib
import itertools
import json
import math
import shutil
from pathlib import Path

import h5py
import numpy as np
import torch
import yaml
from tqdm import tqdm

from ups.config import UsageError
from ups.data.pdebench import TASKS
from ups.data.solvers import SOLVERS
from ups.data.stochastic import make_stochastic
from ups.files import flush, lock

# What our own incompressible files say beside nu; the published ones have walls and a unit square.
NS2D = {"boundary": "periodic", "domain": [[0.0, 2 * np.pi]] * 2}


def make(task, preset="small", out="data", device=None, seed=0, **changes):
    """Write one file per combination of parameter values; return their paths."""
    if task not in SOLVERS:
        raise UsageError(f"there is no solver for {task}; there are {', '.join(SOLVERS)}.")
    if task == "ns2d" and changes.pop("forcing", "constant") == "stochastic":
        return make_stochastic(out, _device(device), seed=seed, **changes)
    solver, out = SOLVERS[task], Path(out)
    if preset not in solver.PRESETS:
        raise UsageError(f"there is no preset {preset}; there are {', '.join(solver.PRESETS)}.")
    settings = solver.PARAMS | solver.PRESETS[preset] | {"task": task, "seed": seed}
    if wrong := changes.keys() - settings.keys():
        known = ", ".join(sorted(settings.keys() - {"task", "seed"}))
        raise UsageError(f"{task} has no setting {min(wrong)}; it has {known}.")
    least = {"samples": 1, "grid": getattr(solver, "LEAST_GRID", 8), "frames": 2, "chunk": 1}
    for key in changes.keys() & least.keys():
        if changes[key] < least[key]:
            raise UsageError(f"--{key} {changes[key]} is too small; {least[key]} is the least.")
    for key in changes.keys() & {"t_end", *solver.PARAMS}:
        for value in np.atleast_1d(changes[key]).tolist():
            if not 0 < value < math.inf:
                raise UsageError(f"--{key} {value:g}: it must be finite and above 0.")

    values = {key: np.atleast_1d(changes.pop(key, settings[key])).tolist() for key in solver.PARAMS}
    jobs = {}
    for combination in itertools.product(*values.values()):
        job = settings | changes | dict(zip(values, map(float, combination), strict=True))
        jobs[out / _name(job, solver)] = job
    todo = {path: job for path, job in jobs.items() if not _complete(path, job)}
    device = _device(device)
    try:
        out.mkdir(parents=True, exist_ok=True)
        need, free = sum(map(_bytes, todo.values())), shutil.disk_usage(out).free
        if need > free:
            raise UsageError(f"{task} {preset} needs {need / 1e9:.3g} GB but {out} has "
                             f"{free / 1e9:.3g} GB free; take --samples or --out to fit.")
        for path, job in todo.items():
            _write_file(path, job, solver, device)
    except (OSError, RuntimeError) as error:  # h5py: a RuntimeError on closing, of several lines
        if isinstance(error, RuntimeError) and "errno" not in str(error):
            raise
        raise UsageError(f"--out {out} cannot be written ({' '.join(str(error).split())}); make "
                         "room, or choose another folder.") from None
    return list(jobs)


def _name(job, solver):
    """The published name; parameters that it leaves out are added where they are not published."""
    pattern = TASKS[job["task"]].file
    extra = "".join(f"_{key}{job[key]}" for key, value in solver.PARAMS.items()
                    if f"{{{key}}}" not in pattern and job[key] != value)
    name = Path(pattern.format(**job))
    return name.with_name(name.name.removesuffix(name.suffix) + extra + name.suffix)


def _write_file(path, job, solver, device):
    partial = path.with_name(path.name + ".partial")  # a name that no reader takes
    held = lock(partial)  # HDF5 would empty the file first, then look for its own lock
    if held is None:
        raise UsageError(f"{path} is being written by another process; wait for it.")
    with held:
        _fill_file(path, partial, job, solver, device)


def _fill_file(path, partial, job, solver, device):
    try:
        with (h5py.File(partial, "w", locking=False) as f,
              tqdm(total=job["samples"], unit=" samples", desc=path.name) as bar):
            create(f, job, {key: job[key] for key in solver.PARAMS})
            written = 0
            for u, force in solved(job, solver, device):
                if not np.isfinite(u).all():
                    raise UsageError(f"{path.name}: the solution is not finite after sample "
                                     f"{written}; nothing is kept, change its parameters.")
                write(f, job["task"], written, u, force)
                written += len(u)
                bar.update(len(u))
            assert written == job["samples"], f"{written} of {job['samples']} samples were solved"
            f.attrs["ups"] = json.dumps(job, sort_keys=True)
        flush(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def solved(job, solver, device):
    """Yield u (n, T, C, *grid), chunk by chunk, and the force (2, *grid) where there is one."""
    params = {key: job[key] for key in solver.PARAMS}
    for start in range(0, job["samples"], job["chunk"]):
        seed = hashlib.sha256(f"{job['seed']}/{start // job['chunk']}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7]))
        u0 = solver.initial(job["chunk"], job["grid"], generator)  # (n, C, *grid)
        u0 = u0[:job["samples"] - start].to(device)
        if "target" in job:  # steady: one frame (a, u)
            u = solver.solve(u0, target=job["target"], generator=generator, **params)
            u = torch.cat([u0, u], 1)[:, None]
        else:
            u = solver.solve(u0, job["t_end"], job["frames"], **params)
        force = solver.force(job["grid"]).numpy() if hasattr(solver, "force") else None
        yield u.cpu().numpy(), force


def create(f, job, params):
    """Prepare an empty file of a layout: data sets of the final shape, coordinates, attributes."""
    task, samples, n, frames = TASKS[job["task"]], job["samples"], job["grid"], job.get("frames")
    grid, (lo, hi) = (n,) * len(task.facts.axes), task.domain
    x = (lo + (np.arange(n) + 0.5) * (hi - lo) / n).astype(np.float32)  # cell centres
    t = np.linspace(0, job.get("t_end", 1.0), frames or 2, dtype=np.float32)
    if task.layout in ("flat", "steady"):
        f.attrs.update({"Nu" if key == "nu" else key: value for key, value in params.items()})
        f.update({f"{axis}-coordinate": x for axis in task.facts.axes})
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
            group.update({f"grid/{axis}": x for axis in task.facts.axes} | {"grid/t": t})


def write(f, task, start, u, force=None):
    """Store u (n, T, C, *grid), as `File.read` gives it, from sample `start` on."""
    layout, part = TASKS[task].layout, slice(start, start + len(u))
    if layout == "flat":
        f["tensor"][part] = u[:, :, 0]
    elif layout == "steady":
        f["nu"][part], f["tensor"][part, 0] = u[:, 0, 0], u[:, 0, 1]
    elif layout == "last":
        f["velocity"][part] = np.moveaxis(u, 2, -1)
        f["force"][part] = np.moveaxis(force, 0, -1)
    else:
        for row, one in enumerate(u, start):
            f[f"{row:04d}/data"][...] = np.moveaxis(one, 1, -1)


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


def _bytes(job):
    task = TASKS[job["task"]]
    frames = 1 if task.layout == "steady" else job["frames"]
    channels = len(task.facts.channels) + len(task.facts.inputs)
    return 4 * job["samples"] * frames * channels * job["grid"] ** len(task.facts.axes)


def _device(name):
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UsageError(f"--device {name} is not here; take cpu or leave it out.") from None
    return device
