"""One HDF5 file of any layout (ups/data/pdebench.py), read lazily as (n, T, C, *grid)."""

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from ups.config import UsageError
from ups.data.tasks import TASKS


@dataclass(frozen=True)
class File:
    """One file, opened anew for every read: nothing to share between processes."""

    path: Path
    task: str
    samples: int
    frames: int
    grid: tuple[int, ...]
    channels: tuple[str, ...]
    params: dict[str, float]
    boundary: str
    domain: tuple[tuple[float, float], ...]
    attributes: dict = field(repr=False)
    times: np.ndarray = field(repr=False)  # (T,)
    groups: tuple[str, ...] = field(repr=False)

    def read(self, rows, frames=None, stride=1):
        """Float32 (n, T, C, *grid): rows in any order, a `range` of frames, every stride-th point.

        Neighbouring samples are read in `pieces`: the memory taken is that of the result.
        """
        rows, frames = np.asarray(rows), range(self.frames) if frames is None else frames
        grid = tuple(len(range(0, n, stride)) for n in self.grid)
        out = np.empty((len(rows), len(frames), len(self.channels), *grid), np.float32)
        order = np.argsort(rows, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(rows[order]) != 1) + 1)
        size = 4 * len(self.channels) * math.prod(grid) * stride  # of a frame, last axis unstrided
        with h5py.File(self.path) as f:
            for run in runs if len(rows) else ():
                for i, k in pieces(len(run), len(frames), size):
                    part = rows[run[i]]
                    try:
                        block = self._block(f, part, frames[k], stride)
                        if block.shape != (wanted := (*out[run[i], k].shape,)):
                            raise ValueError(f"of shape {block.shape}, not {wanted}")
                        out[run[i], k] = block
                    except (OSError, LookupError, TypeError, ValueError) as error:
                        raise UsageError(
                            f"{self.path}: samples {part[0]} to {part[-1]} cannot be read ("
                            f"{' '.join(str(error).split())}); `python -m ups.data validate "
                            f"{shlex.quote(str(self.path))}` names them.") from None
        return out

    def _block(self, f, rows, frames, stride):
        """Consecutive rows. The fastest axis is read whole: a disk page holds it anyway."""
        dim, layout = len(self.grid), TASKS[self.task].layout
        part, every = slice(rows[0], rows[-1] + 1), (slice(None, None, stride),)
        space = every * (dim - 1)  # what HDF5 strides over; numpy does the last axis
        if layout == "steady":
            a, u = f["nu"][(part, *space)], f["tensor"][(part, 0, *space)]
            both = np.stack([np.stack([a, 0 * u], 1), np.stack([a, u], 1)], 1)
            return both[:, frames.start:frames.stop:frames.step, ..., ::stride]
        time = slice(frames.start, frames.stop, frames.step)
        if layout == "flat":
            names = self.channels if len(self.channels) > 1 else ("tensor",)
            return np.stack([f[name][(part, time, *space)][..., ::stride] for name in names], 2)
        if layout == "groups":
            block = np.stack([f[self.groups[row]]["data"][(time, *space)] for row in rows])
        else:
            names = [name for name in ("velocity", "particles") if name in f]
            block = np.concatenate([f[name][(part, time, *space)] for name in names], -1)
        return np.moveaxis(block[..., ::stride, :], -1, 2)


def pieces(rows, frames, size, limit=2**25):
    """Cut rows x frames of `size` bytes each into (slice, slice) below `limit`, rows first."""
    step = max(1, limit // (size * max(frames, 1)))
    span = frames if step > 1 else max(1, limit // size)
    for i in range(0, rows, step):
        for k in range(0, frames, span):
            yield slice(i, min(i + step, rows)), slice(k, min(k + span, frames))
