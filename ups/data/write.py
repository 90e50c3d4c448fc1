"""Write fields as the project's own HDF5, which netCDF-4 readers open too.

One variable for each channel and input over the axes (sample, t, x, ..), which are dimension
scales; parameters over `sample`; facts as attributes (ups/data/facts.py).
"""

import contextlib
import io
import itertools
import json
import math
import tempfile
import zipfile
from pathlib import Path

import h5py
import numpy as np

from ups.config import UsageError
from ups.data.arrays import open_array
from ups.data.facts import READ, Facts, attributes, beside, check_facts, understand, words
from ups.data.file import even_times
from ups.data.find import find
from ups.data.well import SPLITS
from ups.files import flush, lock


def write_fields(path, u, *, t=None, channels=None, axes=None, boundary=None, params=None,
                 inputs=None, made=None, **facts):
    """Write trajectories and what is known of them; return the path.

    u: an array (N, T[, C], *grid), or an iterable of trajectories (T[, C], *grid). A trajectory may
    be a pair: its array, and {name: an input ([T,] *grid), or a number, which is a parameter}.
    t: times (T,), or say `dt`. params: {name: number or (N,)}. inputs: {name: ([N,] [T,] *grid)}.
    Where N = T, an input says which of the two it has: (N, 1, *grid), or (1, T, *grid).
    channels, axes (of space), boundary (of each) and any other fact: words, or as Facts has them.
    The points of an axis go by its name: `x=`. made: how, for JSON; `make` looks for it.
    """
    path = Path(path)
    if path.suffix in (".npy", ".npz", ".zarr"):
        raise UsageError(f"{path}: this writes HDF5; let the name end in .h5.")
    for key, value in (("params", params), ("inputs", inputs)):
        if hasattr(value, "shape"):
            raise UsageError(f"{path}: {key} have no names; write {key}={{'name': values}}.")
    given = ({name: unmasked(value) for name, value in inputs.items()}
             if isinstance(inputs, dict) else {})
    said = {"channels": channels, "axes": axes, "boundary": boundary, "inputs": [*given] or inputs}
    names = understand(said, path)[0].get("axes", ("x", "y", "z"))
    points = {name: facts.pop(name) for name in names if name in facts}
    facts, params = understand(said | facts | {
        key: unmasked(value) for key, value in (params or {}).items()}, path, strict=True)
    rows = (_by_name(row, facts, path) for row in u)
    if (first := next(rows, None)) is None:
        raise UsageError(f"{path}: there is no trajectory to write.")
    frames, *grid = next(iter(first.values())).shape  # of a channel
    space = names[:len(grid)]
    points["t"] = np.arange(frames) * facts.get("dt", 1.0) if t is None else t
    for axis, n, (low, high) in zip(("t", *space), (frames, *grid), (
            (0, 1), *facts.get("domain", [(0, 1)] * len(grid))), strict=True):
        points.setdefault(axis, low + (np.arange(n) + 0.5) * (high - low) / n)
        if np.size(points[axis]) != n:
            raise UsageError(f"{path}: {axis} has {np.size(points[axis])} coordinates for {n} "
                             + ("frames; all trajectories share their times." if axis == "t" else
                                "points; leave out a last one that repeats the first."))
    early = {"name": path.stem, "boundary": ("",) * len(grid), "domain": ((0, 1),) * len(grid),
             "dt": 1.0} | facts | {"axes": space, "grid": (*grid,), "frames": frames}
    check_facts(Facts(**early), path)  # before hours of a generator, not after them
    even_times(np.asarray(points["t"]), path)
    with new_file(path, open_array) as f:
        numbers = f.create_dataset("sample", (0,), "i4", maxshape=(None,), chunks=(1024,))
        scales = {"sample": numbers} | {
            axis: f.create_dataset(axis, data=values) for axis, values in points.items()}
        for axis, one in scales.items():
            one.make_scale(axis)

        def create(name, axes, shape, **options):
            if name in f or name in READ or words(name) != (name,) or "/" in name:
                raise UsageError(f"{path}: {name!r} names two things, or has a blank or a slash in "
                                 "it; rename the channel, input or parameter.")
            one = f.create_dataset(name, shape, "f4" if len(axes) > 1 else "f8", **options)
            for dim, axis in zip(one.dims, axes, strict=True):
                dim.attach_scale(scales[axis])
            return one

        stored, shapes = {}, {name: value.shape for name, value in first.items()}
        for name, shape in shapes.items():
            time = ("t",) * (len(shape) > len(grid))
            frame = max(1, 2**18 // math.prod(shape[1:]))  # those that make a megabyte
            stored[name] = create(
                name, ("sample", *time, *space)[:len(shape) + 1], (0, *shape),
                maxshape=(None, *shape),
                chunks=(1, min(shape[0], frame), *shape[1:]) if shape else (1024,))
        for row, one in enumerate(itertools.chain([first], rows)):
            if (other := {name: value.shape for name, value in one.items()}) != shapes:
                raise UsageError(f"{path}: trajectory {row} has shapes {other}, the first has "
                                 f"{shapes}.")
            for name, value in one.items():
                stored[name].resize(row + 1, 0)
                stored[name][row] = value
            f.disk_is_fine()
        numbers.resize(row + 1, 0)
        numbers[...] = np.arange(row + 1)
        sizes, same = {"sample": row + 1, "t": frames}, row + 1 == frames
        ways = {(): (), (1, frames): ("t",), (row + 1, 1): ("sample",),
                (row + 1, frames): ("sample", "t")}
        ways |= {} if same else {(row + 1,): ("sample",), (frames,): ("t",)}
        for name, value in given.items():
            lead = np.shape(value)[:np.ndim(value) - len(grid)]
            if lead not in ways or np.shape(value) != (*lead, *grid):
                some = "{} or 1, {} or 1," if same else "[{},] [{},]"
                raise UsageError(f"{path}: input {name} has shape {np.shape(value)}, where "
                                 f"({some.format(row + 1, frames)} {str(grid)[1:-1]}) is expected.")
            shape = (*(sizes[axis] for axis in ways[lead]), *grid)
            create(name, (*ways[lead], *space), shape, data=np.reshape(value, shape))
        for name, value in params.items():
            if np.size(value) not in (1, row + 1):
                raise UsageError(f"{path}: parameter {name} has shape {np.shape(value)} for "
                                 f"{row + 1} samples.")
            create(name, ("sample",), (row + 1,), data=np.broadcast_to(value, row + 1))
        params = (*params, *(name for name, shape in shapes.items() if not shape))
        facts = {"name": path.stem} | facts | {"params": params or None, "axes": None}
        f.attrs.update(attributes(facts))  # the variables name their axes
        if made:
            f.attrs["ups"] = json.dumps(made, sort_keys=True)
    return path


def unmasked(values):
    """An array; what a mask hides is NaN."""
    masked = np.ma.is_masked(values)
    return values.astype(float).filled(np.nan) if masked else np.asarray(values)


def _by_name(row, facts, path):
    """One trajectory as {name: array}, channels first; adds to `facts` what they are called."""
    row, more = row if isinstance(row, tuple) else (row, {})
    row, channels = unmasked(row), facts.get("channels", ())
    if row.dtype.kind not in "fiub":
        raise UsageError(f"{path}: the fields are {row.dtype}, and no real numbers; give the real "
                         "and imaginary parts of complex ones as two channels.")
    shape = row.shape
    space = next((len(facts[key]) for key in ("axes", "boundary", "domain") if key in facts),
                 1 if row.ndim == 2 else None)
    if space is None and channels:  # one of one channel may have an axis for it
        space = row.ndim - 1 - (len(channels) > 1 or row.shape[1] == 1)
    unsaid = not channels and "axes" not in facts and row.ndim == 3 and row.shape[1] > 3
    if space is None or row.ndim not in (space + 1, space + 2 - unsaid):
        raise UsageError(f"{path}: a trajectory of shape {row.shape} may have a channel axis or "
                         "none; name the axes of space, such as axes='x y'.")
    if row.ndim == space + 1:
        row, channels = row[:, None], channels or ("u",)
    channels = facts["channels"] = channels or tuple(f"u{c}" for c in range(row.shape[1]))
    if len(channels) != row.shape[1]:
        how = " channels," * (row.shape == shape)
        raise UsageError(f"{path}: a trajectory of shape {shape}, (times,{how} {space} of space), "
                         f"has {row.shape[1]} channels, not {' '.join(channels)!r}.")
    if doubled := [name for name in channels if channels.count(name) > 1]:
        raise UsageError(f"{path}: two channels are called {doubled[0]!r}; rename one.")
    more = {name: unmasked(value) for name, value in more.items()}
    if given := [name for name, value in more.items() if value.ndim]:
        facts["inputs"] = tuple(dict.fromkeys((*facts.get("inputs", ()), *given)))
    return dict(zip(channels, row.swapaxes(0, 1), strict=True)) | more


def convert(src, dst, axes="", said=None, tasks=()):
    """Write any readable data set as own HDF5, a trajectory at a time; return the paths.

    `dst` is a folder where it ends in a slash, and for several files, with folders for splits.
    """
    src, out = Path(src), Path(dst)
    if zipfile.is_zipfile(src) and any(one.compress_type for one in zipfile.ZipFile(src).filelist):
        said = beside(src.with_suffix(".yaml")) | (said or {})
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as place:
            np.savez(Path(place) / src.name, **np.load(src))
            return convert(Path(place) / src.name, dst, axes, said, tasks)
    files = sum(find(src, tasks, axes, said).values(), [])
    inside = len(files) > 1 or out.is_dir() or str(dst).endswith("/")
    if inside and out.suffix:
        raise UsageError(f"{src} has {len(files)} files; name a folder to write them to, not "
                         f"{out}.")
    folders = {split: folder for folder, split in SPLITS.items()} | {"": ""}
    return [copy(file, out / folders[file.split] / f"{file.path.stem}.h5" if inside else out)
            for file in files]


def copy(file, path):
    """Write one file as own HDF5; return the path."""
    facts = file.facts

    def trajectories():
        for row in range(file.samples):
            given = file.read_inputs([row])[0].swapaxes(0, 1)  # (E, T or 1, *grid)
            yield file.read([row])[0], {
                name: value if facts.inputs_vary else value[0]
                for name, value in zip(facts.inputs, given, strict=True)}

    return write_fields(path, trajectories(), t=file.times, **facts.said(),
                        params=dict(zip(facts.params, file.params.T, strict=True)))


class _Told(io.FileIO):
    """A file that keeps its fault to itself: HDF5 crashes where a write fails."""

    fault = None

    def flush(self):
        """Nothing is buffered."""

    def write(self, data):
        rest = memoryview(data)
        try:
            while rest and not self.fault:
                rest = rest[super().write(rest):]
        except OSError as fault:
            self.fault = fault
        return len(data)

    def truncate(self, size=None):
        if not self.fault:
            super().truncate(size)

    def check(self):
        if self.fault:
            raise UsageError(f"{self.name} cannot be written ({self.fault.strerror}); make room, "
                             "or choose another folder.")


@contextlib.contextmanager
def new_file(path, check=None):
    """An HDF5 file that appears whole, once `check(path)` has read it, or not at all.

    Its `disk_is_fine()` raises where a write failed.
    """
    partial = path.with_name(f"{path.name}.partial")  # a name that no reader takes
    held = lock(partial, "--out")  # HDF5 would empty the file first, then look for its own lock
    if held is None:
        raise UsageError(f"{path} is being written by another process; wait for it.")
    with held:
        try:
            with _Told(partial, "w+") as file:
                try:
                    with h5py.File(file, "w") as f:
                        f.disk_is_fine = file.check
                        yield f
                finally:
                    file.check()
            if check:
                check(partial)
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        except UsageError as error:
            raise UsageError(str(error).replace(str(partial), str(path))) from None
        finally:
            partial.unlink(missing_ok=True)
