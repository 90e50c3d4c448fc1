"""One file of any format, read lazily as (n, T, C, *grid)."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.facts import Facts, check_facts
from ups.data.stores import opened


@dataclass(frozen=True)
class File:
    """What a reader has found in a file, which is opened anew for every read.

    So there is nothing to share between processes. The facts are those of all frames and points.
    """

    path: Path
    facts: Facts
    samples: int
    times: np.ndarray = field(repr=False)   # (T,) of the stored frames
    params: np.ndarray = field(repr=False)  # (samples, P), float64, in the order of facts.params
    sources: dict = field(default_factory=dict, repr=False)  # {name: (variable, its component)}
    split: str = ""                         # train, val or test, where the folders say so
    test: str = ""                          # the first or last tenth, where that is published
    family: bool = False                    # sample i begins alike in files of other parameters
    warnings: tuple[str, ...] = ()          # sentences: what the reader decided by itself
    parts: tuple["File", ...] = field(default=(), repr=False)  # of a folder: one for each sample

    def read(self, rows, frames=None, stride=1, channels=None):
        """Float32 (n, T, C, *grid): rows in any order, a `range` of frames, every stride-th point.

        `channels` are those that are predicted, unless named. Neighbouring rows are read at once.
        """
        facts = self.facts
        channels = facts.channels if channels is None else tuple(channels)
        rows = np.asarray(rows, dtype=np.int64)
        frames = range(facts.frames) if frames is None else frames
        grid = tuple(len(range(0, n, stride)) for n in facts.grid)
        out = np.empty((len(rows), len(frames), len(channels), *grid), np.float32)
        if self.parts:
            for one, row in zip(out, rows, strict=True):
                one[:] = self.parts[row].read([0], frames, stride, channels)[0]
            return out
        order = np.argsort(rows, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(rows[order]) != 1) + 1)
        sources = [self.sources[name] for name in channels]
        with opened(self.path) as f:
            for variable in dict.fromkeys(one for one, _ in sources):
                parts = {c: k for c, (one, k) in enumerate(sources) if one == variable}
                low, high = min(parts.values()), max(parts.values()) + 1
                for run in runs if len(rows) else ():
                    span = slice(rows[run[0]], rows[run[-1]] + 1)
                    u = variable.read(f, facts.axes, span, frames, slice(low, high), stride)
                    for c, k in parts.items():
                        out[run, :, c] = u[:, :, k - low]
        if facts.steady and channels != facts.inputs:  # frame 0 holds nothing
            out[:, np.array(frames) == 0] = 0
        return out

    def read_inputs(self, rows, frames=None, stride=1):
        """The same of the inputs: (n, T, E, *grid), T = 1 where they do not vary in time."""
        frames = frames if self.facts.inputs_vary else range(1)
        return self.read(rows, frames, stride, self.facts.inputs)


def agree(files):
    """Refuse files that differ in what those of one data set share."""
    for other in files[1:]:
        for what in ("channels", "inputs", "axes", "grid", "boundary", "domain", "params", "dt"):
            a, b = getattr(files[0].facts, what), getattr(other.facts, what)
            if a != b and not (what == "dt" and math.isclose(a, b, rel_tol=1e-3)):
                raise UsageError(f"{files[0].path} and {other.path} differ in {what} ({a} and {b}) "
                                 "and cannot be one data set; choose by --data FILE.")


def found(path, sizes, channels, inputs, points, params, said, warnings=(), **more):
    """The File that a reader has found: its parts as stored, and the facts that are said.

    sizes: {axis: n}, space in stored order. channels, inputs: {name: (variable, component)}.
    points: {axis: coordinates}. params: {name: number or (N,)}.
    """
    space = tuple(axis for axis in sizes if axis not in ("sample", "time"))
    samples, frames, warnings = sizes.get("sample", 1), sizes.get("time", 2), list(warnings)
    dt, domain, columns, coordinates = said.get("dt"), said.get("domain"), [], {}
    if said.get("steady") and frames != 2:
        raise UsageError(f"{path}: it is said to be steady, but has {frames} frames; leave the "
                         "axis of time out.")
    alone = {(axis, 1) for axis in space}  # what does not vary along an axis may have one point
    for name, (one, k) in (channels | inputs).items():
        if one.kind not in "fiub" or len(one.axes) != len(one.shape) or any(
                k >= n if axis == "channel" else n != sizes.get(axis, n) and (axis, n) not in alone
                for axis, n in zip(one.axes, one.shape, strict=True)):
            raise UsageError(f"{path}: {name} is {one} of kind {one.kind}, which are no numbers "
                             f"over {samples} samples, {frames} frames, "
                             f"{' x '.join(str(sizes[axis]) for axis in space)} points.")
    for axis, x in points.items():
        n, shape = sizes[axis], x.shape[-1:] if axis == "time" else x.shape
        if x.dtype.kind in "fiu" and shape in ((n,), (n + (axis == "time"),)):
            coordinates[axis] = x[..., :n]
        elif other := [name for name, m in sizes.items() if x.shape == (m,)]:
            raise UsageError(f"{path}: {axis} has {n} points by the axes, but {len(x)} "
                             f"coordinates, as many as {other[0]}; say the axes in the order of "
                             "storage.")
        else:
            warnings.append(f"coordinates {axis} {x.shape} are passed over: it has {n} points.")
    times = coordinates.get("time")
    if times is not None:
        times, step = even_times(times, path)
        if dt and not math.isclose(dt, step, rel_tol=1e-2):
            raise UsageError(f"{path}: dt is said to be {dt:g}, but its frames are {step:g} apart; "
                             "say what is true.")
        dt = dt or step
    elif not dt and not said.get("steady"):
        warnings.append("nothing says the time between frames; it is taken as 1 (say dt).")
    if domain is None:
        domain = tuple(ends(coordinates[axis], axis, warnings, path)
                       if axis in coordinates else (0.0, 1.0) for axis in space)
    for name, value in params.items():
        value = np.asarray(value, np.float64)
        if value.size not in (1, samples) or not np.isfinite(value).all():
            raise UsageError(f"{path}: parameter {name} must be a finite number, or one for each "
                             f"of {samples} samples; it is {value.ravel()[:4].tolist()} "
                             f"({value.size} value{'s' * (value.size != 1)}).")
        columns.append(np.broadcast_to(value.ravel(), samples))
    facts = Facts(**{"name": path.stem, "boundary": ("",) * len(space)} | said | {
        "channels": tuple(channels), "inputs": tuple(inputs), "axes": space, "domain": domain,
        "inputs_vary": any("time" in one.axes for one, _ in inputs.values()), "dt": dt or 1.0,
        "grid": tuple(sizes[axis] for axis in space), "frames": frames, "params": tuple(params)})
    check_facts(facts, path)
    return File(path, facts, samples, np.arange(frames) * facts.dt if times is None else times,
                np.array(columns).reshape(len(params), samples).T, channels | inputs,
                warnings=tuple(warnings), **more)


def pieces(rows, frames, size, limit=2**25):
    """Cut rows x frames of `size` bytes each into (slice, slice) below `limit`, rows first."""
    step = max(1, limit // (size * max(frames, 1)))
    span = frames if step > 1 else max(1, limit // size)
    for i in range(0, rows, step):
        for k in range(0, frames, span):
            yield slice(i, min(i + step, rows)), slice(k, min(k + span, frames))


def even_times(t, where):
    """Times of the frames (T,) and the time between two, of those of every sample ([N,] T)."""
    t = np.atleast_2d(t).astype(np.float64)
    steps = np.diff(t) if t.shape[1] > 1 else np.ones((1, 1))
    dt = (t[0, -1] - t[0, 0]).item() / max(1, t.shape[1] - 1) or 1.0
    if (steps < 0).all():
        raise UsageError(f"{where}: the times of the frames fall; store them in ascending order.")
    if not (steps > 0).all() or abs(steps - dt).max() > 1e-3 * dt + 4e-7 * abs(t).max():
        raise UsageError(f"{where}: the times of the frames are uneven, with steps from "
                         f"{steps.min():g} to {steps.max():g}; interpolate to even frames.")
    return t[0], dt


def ends(x, axis, warnings, where):
    """Both ends of an axis: half a cell beyond its first and last point."""
    fine, x = x.dtype.itemsize > 4, x.astype(np.float64)
    steps = np.diff(x) if len(x) > 1 else np.ones(1)
    h = steps.mean().item()
    if not (steps * h > 0).all():  # NaN is neither
        raise UsageError(f"{where}: the points of {axis} do not all rise, nor all fall; store them "
                         "in order, or leave them out and say domain.")
    if abs(steps - h).max() > 1e-2 * abs(h) + 4e-7 * abs(x).max():
        warnings.append(f"the points of {axis} are uneven; they are taken as even.")
    digits = (12 if fine else 6) - math.ceil(math.log10(abs(h) * len(x) or 1))
    return tuple(round(float(end), digits) + 0.0 for end in (x[0] - h / 2, x[-1] + h / 2))


def natural(path):
    """Sorts numbers in names as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
