"""`validate`: every fault of a file as one sentence; an empty list means that it is sound."""

import hashlib
from pathlib import Path

import h5py
import numpy as np

from ups.config import UsageError
from ups.data.fields import SPLITS, Fields
from ups.data.file import UnreadableSamples, pieces
from ups.data.pdebench import open_pdebench, uneven

SHOWN = 10  # faults of one kind that are spelled out


def validate(paths):
    """Read everything, in bounded pieces, and tell the faults of the files and between splits."""
    faults, prints, files = [], {}, []
    for path in paths:
        try:
            files.append(open_pdebench(path))
        except (UsageError, OSError) as error:
            if not Path(path).exists():
                raise
            faults.append(str(error))
    for file in files:
        found, prints[file.path] = _check(file)
        faults += [f"{file.path}: {fault}" for fault in found]
    for task in dict.fromkeys(file.facts.name for file in files):
        faults += _shared([file for file in files if file.facts.name == task], prints)
    return faults


def _check(file):
    """Faults of one file, and a fingerprint of every trajectory that can be read."""
    faults = []
    if file.facts.frames < 2:
        faults.append(f"it has {file.facts.frames} frame; a trajectory needs two.")
    faults += [f"axis {axis} {what}." for axis, what in uneven(file).items()]
    faults += _some(_ragged(file))
    digests = [hashlib.blake2b(digest_size=16) for _ in range(file.samples)]
    low, high, infinite, unread = np.inf, -np.inf, {}, {}
    size = 4 * len(file.facts.channels) * int(np.prod(file.facts.grid))
    for rows, frames in pieces(file.samples, file.facts.frames, size):
        for row, u in _samples(file, rows, frames, unread):
            finite = np.isfinite(u).all(axis=tuple(range(1, u.ndim)))
            if not finite.all():
                infinite.setdefault(row, frames.start + int(np.argmin(finite)))
            axes = (0, *range(2, u.ndim))
            low, high = np.fmin(low, u.min(axes)), np.fmax(high, u.max(axes))
            digests[row].update(np.ascontiguousarray(u))
    faults += _some([f"sample {row} cannot be read ({why})." for row, why in unread.items()])
    faults += _some([f"sample {row} holds NaN or Inf, first at frame {frame}."
                     for row, frame in infinite.items()])
    faults += [f"channel {name} is constant ({value:g})." for name, value, same in
               zip(file.facts.channels, np.atleast_1d(low), np.atleast_1d(low == high),
                   strict=False)
               if same]
    return faults, [None if row in unread else one.digest() for row, one in enumerate(digests)]


def _ragged(file):
    """Samples of another shape or with other times than the first, where each has its own."""
    times, faults, first = {}, [], (file.facts.frames, *file.facts.grid, len(file.facts.channels))
    with h5py.File(file.path) as f:
        if file.layout == "last":
            times = dict(enumerate(np.atleast_2d(f["t"][:])))
        for row, key in enumerate(file.groups):
            try:
                shape, times[row] = f[key]["data"].shape, f[key]["grid/t"][:]
            except (KeyError, AttributeError, ValueError):
                faults.append(f"sample {row} has no data or no times.")
                continue
            if shape != first:
                faults.append(f"sample {row} has shape {shape}, the first "
                              f"{first}.")
    return faults + [f"sample {row} has other times than the first." for row, t in times.items()
                     if len(t) < len(file.times) or not np.allclose(t[:len(file.times)],
                                                                    file.times)]


def _samples(file, rows, frames, unread):
    """Yield (row, u (T, C, *grid)); where a piece fails, sample by sample, so as to name it."""
    times = range(file.facts.frames)[frames]
    rows = range(file.samples)[rows]
    try:
        yield from zip(rows, file.read(rows, times), strict=True)
        return
    except UsageError:
        pass
    for row in rows:
        try:
            u = file.read([row], times)[0]
        except UnreadableSamples as error:
            unread[row] = error.why
        else:
            yield row, u


def _shared(files, prints):
    """Trajectories that are in two splits, over all files that form one data set."""
    try:
        sets = [Fields(files)]
    except UsageError:  # they differ; each is a data set by itself
        sets = [Fields([file]) for file in files if file.facts.frames > file.facts.first_frame + 1]
    faults = []
    for fields in sets:
        if fields.samples < 4:
            faults.append(f"{fields.files[0].path}: {fields.samples} samples cannot be split.")
            continue
        split = {i: name for name in SPLITS for i in fields.split(name).tolist()}
        seen = {}
        for file, start in zip(fields.files, fields.starts, strict=False):
            for row, fingerprint in enumerate(prints[file.path]):
                where = split[row + start], f"sample {row} of {file.path}"
                if fingerprint and seen.setdefault(fingerprint, where)[0] != where[0]:
                    other = seen[fingerprint]
                    faults.append(f"{where[1]} ({where[0]}) is {other[1]} ({other[0]}) again.")
    return _some(faults)


def _some(faults):
    more = len(faults) - SHOWN
    return faults[:SHOWN] + ([f"and {more} more of this kind."] if more > 0 else [])
