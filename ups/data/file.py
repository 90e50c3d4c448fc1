"""One file of any format, read lazily as (n, T, C, *grid)."""

import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.facts import Facts
from ups.data.stores import UNREADABLE, Variable, opened


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
    sources: tuple[tuple[Variable, int], ...] = field(default=(), repr=False)
    #         the variable and its component, of each channel and then of each input
    split: str = ""                         # train, val or test, where the folders say so
    test: str = ""                          # the first or last tenth, where that is published
    family: bool = False                    # sample i begins alike in files of other parameters
    warnings: tuple[str, ...] = ()          # sentences: what the reader decided by itself
    parts: tuple["File", ...] = field(default=(), repr=False)  # of a folder: one for each sample

    def __post_init__(self):
        facts = self.facts
        sizes = {"sample": (self.samples,), "time": (facts.frames,)} | {
            axis: (n, 1) for axis, n in zip(facts.axes, facts.grid, strict=True)}
        for name, (one, k) in zip((*facts.channels, *facts.inputs), self.sources, strict=False):
            fits = len(one.axes) == len(one.shape) and one.kind in "fiub"
            for axis, n in zip(one.axes, one.shape, strict=False):
                fits &= k < n if axis == "channel" else n in sizes.get(axis, (n,))
            if not fits:
                raise UsageError(f"{self.path}: {name} is {one} of kind {one.kind}, which are no "
                                 f"numbers over {self.samples} samples, {facts.frames} frames, "
                                 f"{' x '.join(map(str, facts.grid))} points.")

    def read(self, rows, frames=None, stride=1, channels=None):
        """Float32 (n, T, C, *grid): rows in any order, a `range` of frames, every stride-th point.

        `channels` are those that are predicted, unless named. Neighbouring samples are read in
        `pieces`: the memory taken is that of the result.
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
        size = 4 * len(channels) * math.prod(grid) * stride  # of a frame, last axis unstrided
        with opened(self.path) as f:
            for run in runs if len(rows) else ():
                for i, k in pieces(len(run), len(frames), size):
                    part = rows[run[i]]
                    try:
                        out[run[i], k] = self._block(f, channels, part, frames[k], stride)
                    except UNREADABLE as error:
                        raise UnreadableSamples(self.path, part, error) from None
        return out

    def read_inputs(self, rows, frames=None, stride=1):
        """The same of the inputs: (n, T, E, *grid), T = 1 where they do not vary in time."""
        frames = frames if self.facts.inputs_vary else range(1)
        return self.read(rows, frames, stride, self.facts.inputs)

    def _block(self, f, channels, rows, frames, stride):
        """Some frames of consecutive rows; what a variable has no axis for is repeated."""
        facts, names = self.facts, (*self.facts.channels, *self.facts.inputs)
        wanted = [self.sources[names.index(name)] for name in channels]
        rows = slice(int(rows[0]), int(rows[-1]) + 1)
        span = slice(frames.start, frames.stop, frames.step)
        grid = (len(range(0, n, stride)) for n in facts.grid)
        out = np.empty((rows.stop - rows.start, len(frames), len(channels), *grid), np.float32)
        for variable in dict.fromkeys(variable for variable, _ in wanted):
            parts = [(c, k) for c, (one, k) in enumerate(wanted) if one == variable]
            low, high = min(k for _, k in parts), max(k for _, k in parts)
            block = variable.read(f, facts.axes, rows, span, slice(low, high + 1), stride)
            for c, k in parts:
                out[:, :, c] = block[:, :, k - low]
                if facts.steady and channels[c] in facts.channels and "time" not in variable.axes:
                    out[:, [i for i, frame in enumerate(frames) if frame == 0], c] = 0
        return out


class UnreadableSamples(UsageError):
    """Some samples of a file cannot be read; `why` is the fault itself."""

    def __init__(self, path, rows, error):
        self.why = " ".join(str(error).split())
        super().__init__(f"{path}: samples {rows[0]} to {rows[-1]} cannot be read ({self.why}); "
                         f"`python -m ups.data validate {shlex.quote(str(path))}` names them.")


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
    if not (steps > 0).all() or abs(steps - dt).max() > 1e-3 * dt + 4e-7 * abs(t).max():
        raise UsageError(f"{where}: the times of the frames are uneven, with steps from "
                         f"{steps.min():g} to {steps.max():g}; interpolate to even frames.")
    return t[0], dt


def ends(x, axis, warnings):
    """Both ends of an axis: half a cell beyond its first and last point."""
    fine, x = x.dtype.itemsize > 4, x.astype(np.float64)
    steps = np.diff(x) if len(x) > 1 else np.ones(1)
    h = steps.mean().item()
    if abs(steps - h).max() > 1e-2 * abs(h) + 4e-7 * abs(x).max():
        warnings.append(f"the points of {axis} are uneven; they are taken as even.")
    digits = (12 if fine else 6) - math.ceil(math.log10(abs(h) * len(x) or 1))
    return tuple(round(float(end), digits) + 0.0 for end in (x[0] - h / 2, x[-1] + h / 2))


def natural(path):
    """Sorts numbers in names as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
