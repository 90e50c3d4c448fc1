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

import numpy as np
import torch
from tqdm import tqdm

from ups.config import Parser, UsageError
from ups.data import stochastic
from ups.data.pdebench import NS2D, TASKS
from ups.data.solvers import SOLVERS
from ups.data.stores import HDF5, opened
from ups.data.write import write_fields
from ups.files import sha256

LEAST = {"samples": 1, "grid": 16, "frames": 2, "chunk": 1}


def make(task, out="data", device=None, seed=0, words=(), **changes):
    """Write one file per combination of parameter values; return their paths.

    `task` is that of a bundled solver, or a Python file with a solver. Its settings are `changes`,
    or `words` of a command line.
    """
    out = Path(out)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if task.endswith(".py"):
        path = out if out.suffix in HDF5 else out / f"{Path(task).stem}.h5"
        return [_make_own(Path(task), path, device, seed, words, changes)]
    if task == "ns2d" and changes.pop("forcing", "constant") == "stochastic":
        return _make_stochastic(out, device, seed, words, changes)
    solver, preset = SOLVERS.get(task), changes.pop("preset", "small")
    if not solver or preset not in solver.PRESETS:
        there = ", ".join(solver.PRESETS if solver else SOLVERS)
        raise UsageError(f"there is no preset {preset}; there are {there}." if solver else
                         f"there is no solver for {task}; there are {there}, and any file.py "
                         "with one.")
    known = solver.PARAMS | solver.PRESETS[preset]
    settings = _settings(task, known, words, changes, several=solver.PARAMS)
    facts, paths = TASKS[task].facts.said() | (NS2D if task == "ns2d" else {}), []
    there = {path: settings_of(path) for path in sorted(out.glob("*.h*5"))}
    for values in itertools.product(*(np.atleast_1d(settings[key]) for key in solver.PARAMS)):
        params = dict(zip(solver.PARAMS, map(float, values), strict=True))
        job = settings | params | {"task": task, "seed": seed}
        same = params | {"task": task}  # of one file, whatever its name
        path = next((path for path, made in there.items() if same.items() <= made.items()),
                    out / f"{'_'.join([task, *(f'{k}{v}' for k, v in params.items())])}.h5")
        parts = map(partial(_solve_bundled, job, params, device), _chunks(job))
        times = np.linspace(0, job.get("t_end", 1.0), job.get("frames", 2), dtype=np.float32)
        paths.append(_write(path, job, parts, **facts, t=times, params=params))
    return paths


def _make_own(source, path, device, seed, words, changes):
    """Write what `solve(generator, n)` of a Python file returns; its FACTS go to `write_fields`.

    A file that imports torch gets a torch.Generator on the device and runs here; any other gets
    one of numpy, in as many processes as there are cores. Arguments of `solve` that have a default
    are settings.
    """
    known, here = _load(source), re.search(r"^\s*(import|from)\s+torch\b", source.read_text(), re.M)
    settings = {name: one.default for name, one in inspect.signature(
        known["solve"]).parameters.items() if one.default is not one.empty}
    job = {"samples": 100, "chunk": 64 if here else 8} | settings
    job = _settings(source, job, words, changes) | {"seed": seed, "solver": sha256(source)}
    solve = partial(_solve_own, source, job, {key: job[key] for key in settings},
                    device if here else None)
    parts = map(solve, _chunks(job)) if here else _in_processes(solve, _chunks(job))
    return _write(path, job, parts, **known.get("FACTS", {}))


def _make_stochastic(out, device, seed, words, changes):
    path, truth = (out / f"ns2d_stochastic{end}" for end in (".h5", ".truth"))
    members = changes.pop("truth", 0)
    _make_own(Path(stochastic.__file__), path, device, seed, words, {"samples": 256} | changes)
    job = settings_of(path) | {"truth": members}
    if members and not _complete(truth, job):
        stochastic.write_truth(truth, path, job, partial(_generator, seed, device=device))
    return [path, truth] if members else [path]


def _settings(task, known, words, changes, several=()):
    """The settings `known` after `changes` and `words`; those in `several` may have many values."""
    parser = Parser(prog=str(task), add_help=False)
    for key, value in known.items():
        parser.add_argument(f"--{key}", default=value, nargs="+" if key in several else None,
                            type={int: int, bool: int, str: str}.get(type(value), float))
    found, rest = parser.parse_known_args([*(
        str(word) for key, value in changes.items()
        for word in (f"--{key}", *np.atleast_1d(value))), *words])
    if rest:
        raise UsageError(f"{task} has no setting {rest[0].lstrip('-')}; it has "
                         f"{', '.join(sorted(known))}.")
    for key, value in vars(found).items():
        low, numbers = LEAST.get(key, -math.inf), value if isinstance(value, list) else [value]
        if value is not known[key] and not all(
                isinstance(one, str) or low <= one < math.inf for one in numbers):
            raise UsageError(f"--{key} {value} is out of range; it must be finite"
                             f"{f' and at least {low}' if key in LEAST else ''}.")
    return vars(found)


def settings_of(path):
    """What a file was made with; empty where we did not make it."""
    try:
        with opened(path) as f:
            return json.loads(f.attrs.get("ups", "{}"))
    except UsageError:
        return {}


def _complete(path, job):
    """True where the file is there with these settings; with others it is never overwritten."""
    if not path.exists():
        return False
    there = settings_of(path)
    if there == json.loads(json.dumps(job)):
        print(f"{path} is complete.")
        return True
    differ = ", ".join(f"{key}={there[key]}" for key in job if there.get(key, job[key]) != job[key])
    raise UsageError(f"{path} is there "
                     f"{f'with other settings ({differ})' if differ else 'and not ours'}; remove "
                     "it or choose another --out.")


def _write(path, job, parts, **facts):
    """Write parts (u (n, T, C, *grid), {name: what each of them has}), all of them finite."""
    if _complete(path, job):
        return path

    def rows():
        with tqdm(total=job["samples"], unit=" samples", desc=path.name) as bar:
            for u, more in parts:
                if not np.isfinite(u).all():
                    raise UsageError(f"{path.name}: a solution is not finite; nothing is kept: "
                                     "change the parameters, or mend the solver.")
                for i, one in enumerate(u):
                    yield one, {name: values[i] for name, values in more.items()}
                bar.update(len(u))

    return write_fields(path, rows(), made=job, **facts)


def _solve_bundled(job, params, device, chunk):
    """A chunk of a task; a steady one has two frames, nothing and the solution, and an input."""
    solver, generator = SOLVERS[job["task"]], _generator(job["seed"], chunk)
    u0 = solver.initial(job["chunk"], job["grid"], generator)  # (n, C, *grid)
    u0 = u0[:job["samples"] - chunk * job["chunk"]].to(device)
    if "frames" in job:
        return _numpy(solver.solve(u0, job["t_end"], job["frames"], **params)), {}
    u = solver.solve(u0, target=job["target"], generator=generator, **params)
    return _numpy(torch.stack([0 * u, u], 1)), {"a": _numpy(u0[:, 0])}


def _solve_own(source, job, settings, device, chunk):
    """The trajectories of a chunk, and their parameters and inputs {name: (n, ..)}."""
    generator, many = _generator(job["seed"], chunk, device), job["chunk"]
    u = _load(source)["solve"](generator, many, **settings)  # whole, however few are taken
    u, more = u if isinstance(u, tuple) else (u, {})
    few, out = min(many, job["samples"] - chunk * many), {}
    for name, value in {"": u, **more}.items():
        value = _numpy(value)
        value = np.full(many, value) if name and not value.ndim else value
        if value.shape[:1] != (many,):
            raise UsageError(f"{source}: solve(generator, {many}) returned "
                             f"{name or 'trajectories'} of shape {value.shape}, where ({many}, ..) "
                             "is expected.")
        out[name] = value[:few]
    return out.pop(""), out


@cache
def _load(source):
    if not source.is_file():
        raise UsageError(f"there is no file {source}.")
    known = runpy.run_path(str(source))
    if not callable(known.get("solve")):
        raise UsageError(f"{source} has no function solve(generator, n).")
    return known


def _in_processes(solve, chunks):
    cores = min(len(chunks), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(cores) as pool:
        for k in range(0, len(chunks), 2 * cores):  # so many wait in memory at most
            yield from pool.map(solve, chunks[k:k + 2 * cores])


def _chunks(job):
    return range(-(-job["samples"] // job["chunk"]))


def _numpy(value):
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _generator(seed, part, device="cpu"):
    """Of torch on the device, of numpy where that is None."""
    seed = int.from_bytes(hashlib.sha256(f"{seed}/{part}".encode()).digest()[:7])
    return torch.Generator(device).manual_seed(seed) if device else np.random.default_rng(seed)
