"""One file of any format, read lazily as (n, T, C, *grid); readers are subclasses of `File`."""

import contextlib
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from ups.config import UsageError
from ups.data.facts import Facts


@dataclass(frozen=True)
class File:
    """One file, opened anew for every read: nothing to share between processes.

    A reader says in `facts` what the file says of itself (all its frames, all its points), and
    gives `_block`.
    """

    path: Path
    facts: Facts
    samples: int
    times: np.ndarray = field(repr=False)   # (T,) of the stored frames
    params: np.ndarray = field(repr=False)  # (samples, P), float64, in the order of facts.params
    split: str = ""                         # train, val or test, where the folders say so
    test: str = ""                          # the first or last tenth, where that is published
    family: bool = False                    # sample i begins alike in files of other parameters
    warnings: tuple[str, ...] = ()          # sentences: what the reader decided by itself

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
        order = np.argsort(rows, kind="stable")
        runs = np.split(order, np.flatnonzero(np.diff(rows[order]) != 1) + 1)
        size = 4 * len(channels) * math.prod(grid) * stride  # of a frame, last axis unstrided
        with self._open() as f:
            for run in runs if len(rows) else ():
                for i, k in pieces(len(run), len(frames), size):
                    part = rows[run[i]]
                    try:
                        block = self._block(f, channels, part, frames[k], stride)
                        if block.shape != (wanted := out[run[i], k].shape):
                            raise ValueError(f"of shape {block.shape}, not {wanted}")
                        out[run[i], k] = block
                    except (OSError, LookupError, TypeError, ValueError) as error:
                        raise UnreadableSamples(self.path, part, error) from None
        return out

    def read_inputs(self, rows, frames=None, stride=1):
        """The same of the inputs: (n, T, E, *grid), T = 1 where they do not vary in time."""
        frames = frames if self.facts.inputs_vary else range(1)
        return self.read(rows, frames, stride, self.facts.inputs)

    @contextlib.contextmanager
    def _open(self):
        with h5py.File(self.path) as f:
            yield f

    def _block(self, f, channels, rows, frames, stride):
        """(n, T, C, *grid) of consecutive rows, in the dtype of the file."""
        raise NotImplementedError


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
