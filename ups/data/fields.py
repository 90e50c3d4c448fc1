"""Trajectories of one task, from all its files, as one data set.

Files of equal parameters are joined along samples. Files of other parameters share sample indices,
because published files share initial conditions by index: trajectory `i` is sample `i % samples` of
parameter set `i // samples`, and the split is by sample. Of the samples, the published tenth is
`test`; a fixed permutation of the rest is cut into `train`, `fit` and `val` (80, 5 and 5 %).
"""

import hashlib
import math
import re
import shlex
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from ups.config import UsageError
from ups.data.file import pieces
from ups.data.pdebench import UnknownLayout, identify, open_file, uneven
from ups.data.tasks import TASKS

SPLITS = ("train", "fit", "val", "test")


class NoData(UsageError, FileNotFoundError):
    """There is no file of that task; the sentence says how to make or get one."""


@dataclass(frozen=True)
class Spec:
    """What a trajectory is, after `first_frame` and the strides."""

    task: str
    grid: tuple[int, ...]
    channels: tuple[str, ...]
    boundary: str  # periodic or closed
    domain: tuple[tuple[float, float], ...]
    dt: float
    frames: int
    params: tuple[str, ...]


class Fields:
    """Lazy view of the files of one task; holds no handle, so any process may use it."""

    def __init__(self, files, stride_x=1, stride_t=1, first_frame=None):
        file, task = files[0], TASKS[files[0].task]
        steady = task.layout == "steady"  # its two frames are no time series
        first = task.first_frame if first_frame is None else first_frame
        self.frames = range(0, 2) if steady else range(first, file.frames, stride_t)
        self.stride_x = stride_x
        if wrong := [n for n in file.grid if n % stride_x]:
            raise UsageError(f"--stride_x {stride_x} does not divide the {wrong[0]} points of "
                             f"{file.path}; {_divisors(wrong[0])} do.")
        if len(self.frames) < 2:
            raise UsageError(f"{file.path}: of {file.frames} frames the first {first} are left "
                             f"out and every {stride_t}th of the others is taken, so fewer than "
                             "two are left; use longer data, or a smaller --stride_t.")
        for other in files[1:]:
            for what in ("grid", "frames", "channels", "boundary", "domain"):
                _agree(file, other, what, getattr(file, what), getattr(other, what))
            if not np.allclose(file.times, other.times, atol=1e-6 * abs(file.times[-1])):
                _agree(file, other, "times", file.times[-1], other.times[-1])

        sets = {}  # parameter values -> files
        for one in sorted(files, key=lambda one: _natural(one.path)):
            sets.setdefault(tuple(one.params.values()), []).append(one)
        values = sorted(sets)
        self.values = torch.tensor(values, dtype=torch.float64).reshape(len(values), -1)
        self.files = [one for value in values for one in sets[value]]
        self.starts = np.cumsum([0] + [one.samples for one in self.files])
        counts = [sum(one.samples for one in sets[value]) for value in values]
        self.samples = counts[0]
        for value, count in zip(values, counts, strict=True):
            _agree(sets[values[0]][0], sets[value][0], "samples", counts[0], count)

        dt = (file.times[-1] - file.times[0]) / (file.frames - 1) * (1 if steady else stride_t)
        grid = tuple(n // stride_x for n in file.grid)
        self.spec = Spec(file.task, grid, file.channels, file.boundary, file.domain, float(dt),
                         len(self.frames), tuple(file.params))

    def __len__(self):
        return int(self.starts[-1])

    def read(self, indices, frames=slice(None)):
        """Float32 (n, T, C, *grid) of trajectories in any order; `frames` takes part of them."""
        indices, frames = np.asarray(indices, dtype=np.int64), self.frames[frames]
        owner = np.searchsorted(self.starts, indices, side="right") - 1
        owners = np.unique(owner)
        if len(owners) == 1:
            return torch.from_numpy(self._part(owners[0], indices, frames))
        shape = (len(indices), len(frames), len(self.spec.channels), *self.spec.grid)
        out = np.empty(shape, np.float32)
        for k in owners:
            out[owner == k] = self._part(k, indices[owner == k], frames)
        return torch.from_numpy(out)

    def _part(self, k, indices, frames):
        file, rows = self.files[k], indices - self.starts[k]
        u = file.read(rows, frames, self.stride_x)
        if not (finite := np.isfinite(u).reshape(len(u), -1).all(1)).all():
            raise UsageError(f"{file.path}: NaN or Inf in sample {rows[np.argmin(finite)]}; "
                             f"`python -m ups.data validate {shlex.quote(str(file.path))}` names "
                             "all of them: mend them, or write a file without them.")
        return u

    def stream(self, indices, megabytes=32):
        """Yield all frames of these trajectories as u (B, C, *grid) of bounded size."""
        size = 4 * len(self.spec.channels) * math.prod(self.spec.grid)
        limit = int(megabytes * 2**20)
        for rows, frames in pieces(len(indices), self.spec.frames, size, limit):
            yield self.read(indices[rows], frames).flatten(0, 1)

    def params(self, indices):
        """Float64 (n, P): raw parameter values in the order of `spec.params`."""
        return self.values[torch.as_tensor(indices, dtype=torch.int64) // self.samples]

    def split(self, name):
        """Int64 indices of a split: the same samples in every parameter set, sample by sample."""
        n = self.samples
        if n < 4:
            raise UsageError(f"{self.files[0].path}: {n} samples cannot be split in four.")
        if name not in SPLITS:
            raise UsageError(f"there is no split {name}; there are {', '.join(SPLITS)}.")
        test, held = max(1, n // 10), max(1, n // 20)
        first = TASKS[self.spec.task].test == "first"
        rest = np.random.RandomState(0).permutation(n - test) + (test if first else 0)
        cut = len(rest) - 2 * held
        part = {"train": rest[:cut], "fit": rest[cut:cut + held], "val": rest[cut + held:],
                "test": np.arange(test) + (0 if first else n - test)}[name]
        part = torch.from_numpy(np.sort(part))  # sorted: neighbours are read in one piece
        return (part[:, None] + torch.arange(len(self.values)) * n).flatten()

    @property
    def about(self):
        """Spec and parameter values, plain: what is needed to use a model without its data."""
        return asdict(self.spec) | {"values": self.values.tolist()}

    @cached_property
    def digest(self):
        """Sha256 of layout, attributes, size and 64 fixed frames (thinned); never a whole read."""
        digest = hashlib.sha256()
        for file in self.files:
            about = (file.task, file.samples, file.frames, file.grid, file.channels, file.params,
                     file.boundary, file.domain, file.attributes, file.times.tolist())
            digest.update(repr(about).encode())
        for i in range(64):
            index, last = i * (len(self) - 1) // 63, self.files[0].frames - 1
            frame = i * last // 63 if last > 1 else last  # steady: the solution
            k = int(np.searchsorted(self.starts, index, side="right")) - 1
            file = self.files[k]
            thin = 1 if len(file.grid) == 1 else max(1, min(file.grid) // 16)
            digest.update(file.read([index - self.starts[k]], range(frame, frame + 1), thin))
        return digest.hexdigest()


def parse_task(text):
    """`burgers1d:nu=0.001,0.01` -> ("burgers1d", {"nu": [0.001, 0.01]})."""
    name, *choices = text.split(":")
    if name not in TASKS:
        raise UsageError(f"there is no task {name}; there are {', '.join(TASKS)}.")
    wanted = {}
    for choice in choices:
        key, _, values = choice.partition("=")
        try:
            wanted[key] = [float(value) for value in values.split(",")]
        except ValueError:
            raise UsageError(f"{text}: write parameters as {name}:key=value,value.") from None
        if key not in TASKS[name].params:
            raise UsageError(f"{text}: {name} has no parameter {key}; it has "
                             f"{', '.join(TASKS[name].params) or 'none'}.")
    return name, wanted


def open_fields(task, root="data", stride_x=1, stride_t=1):
    """Open the files of a task in a folder (or one file), or those of some parameters."""
    name, wanted = parse_task(task)
    files = [open_file(path) for path in find_files(root, name)]
    if not files:
        raise NoData(f"no {name} file in {root}; {_cure(name, wanted, root)}")
    for key, values in wanted.items():
        there = sorted({file.params[key] for file in files})
        if missing := [value for value in values if not _among(value, there)]:
            raise UsageError(f"{root}: no {name} file with {key}={missing[0]:g}, only {there}; "
                             f"{_cure(name, {key: missing}, root)}")
        files = [file for file in files if _among(file.params[key], values)]
    for file in files:
        for axis, what in uneven(file).items():
            raise UsageError(f"{file.path}: axis {axis} {what}.")
    return Fields(files, stride_x, stride_t)


def find_files(root, name):
    """Files of a task in a folder; where it holds none, those in the nearest folder below it.

    So data/ and data/more/ are two data sets, and a download may be given by its root. Other
    layouts are passed over; a damaged file is an error, and so is a choice of two folders.
    """
    root = Path(root)
    if root.suffix in (".h5", ".hdf5") or root.exists() and not root.is_dir():
        if (found := identify(root)) != name:
            raise UsageError(f"{root} is a {found} file, not {name}.")
        return [root]
    depths = {}
    for path in sorted([*root.rglob("*.h5"), *root.rglob("*.hdf5")]):
        depths.setdefault(len(path.parts), []).append(path)
    for _, level in sorted(depths.items()):
        if paths := [path for path in level if _belongs(path, name)]:
            first, *more = sorted({path.parent for path in paths})
            if more:
                raise UsageError(f"{root}: {name} files are in {first} and in {more[0]}; choose "
                                 "one folder by --data.")
            return paths
    return []


def _belongs(path, name):
    try:
        return identify(path) == name
    except UnknownLayout:
        return False


def _cure(name, wanted, root):
    from ups.data.solvers import SOLVERS

    if name not in SOLVERS:
        return "download it from PDEBench, https://doi.org/10.18419/darus-2986."
    flags = "".join(f" --{key} {' '.join(f'{v:g}' for v in values)}"
                    for key, values in wanted.items())
    return f"make one: python -m ups.data make {name}{flags} --out {root}"


def _among(value, values):
    return any(math.isclose(value, other, rel_tol=1e-6) for other in values)


def _agree(a, b, what, left, right):
    if left != right:
        raise UsageError(f"{a.path} and {b.path} differ in {what} ({left} and {right}) and cannot "
                         f"be one data set; choose by --data FILE or {a.task}:key=value.")


def _natural(path):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def _divisors(n):
    return ", ".join(str(k) for k in range(1, min(n, 65)) if n % k == 0)
