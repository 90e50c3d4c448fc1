"""Write fields as the project's own HDF5, which netCDF-4 readers open too.

One variable for each channel and input over the axes (sample, t, x, ..), which are dimension
scales; parameters over `sample`; facts as attributes (ups/data/said.py).
"""

import contextlib
import itertools
import math
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import h5py
import numpy as np

from ups.config import UsageError
from ups.data.arrays import SPLITS, open_array
from ups.data.file import pieces
from ups.data.find import find
from ups.data.said import READ, attributes, understand
from ups.files import flush


def write_fields(path, u, *, t=None, channels=None, axes=None, boundary=None, params=None,
                 inputs=None, **facts):
    """Write trajectories and what is known of them; return the path.

    u: an array (N, T[, C], *grid), or an iterable of trajectories (T[, C], *grid). A trajectory may
    also be {name: array}: channels (T, *grid), `inputs` (then their names) ([T,] *grid), numbers.
    t: times (T,), or say `dt`. params: {name: number or (N,)}. inputs: {name: ([N,] [T,] *grid)}.
    channels, axes (of space), boundary (of each) and any other fact: words, or as Facts has them.
    The points of an axis go by its name: `x=`.
    """
    path = Path(path)
    given = {name: np.asarray(value) for name, value in inputs.items()} if isinstance(
        inputs, dict) else {}
    said = {"channels": channels, "axes": axes, "boundary": boundary, "inputs": [*given] or inputs}
    names = understand(said, path)[0].get("axes", ("x", "y", "z"))
    points = {name: facts.pop(name) for name in names if name in facts}
    facts, params = understand(said | facts | {
        key: np.asarray(value) for key, value in (params or {}).items()}, path, strict=True)
    rows = (_by_name(row, facts, path) for row in u)
    if (first := next(rows, None)) is None:
        raise UsageError(f"{path}: there is no trajectory to write.")
    shapes = {name: value.shape for name, value in first.items() if value.ndim}
    inside = {*facts.get("inputs", ())}
    facts.setdefault("channels", tuple(name for name in shapes if name not in inside))
    if missing := [name for name in facts["channels"] if name not in shapes]:
        raise UsageError(f"{path}: there is no channel {missing[0]}; there are "
                         f"{', '.join(shapes)}.")
    frames, *grid = shapes[facts["channels"][0]]
    space = names[:len(grid)] if axes is None else names
    if len(space) != len(grid):
        raise UsageError(f"{path}: a trajectory has {len(grid)} axes of space, but the axes are "
                         f"{' '.join(names)!r}; name each.")
    samples = len(u) if hasattr(u, "shape") else None
    sizes = {"sample": samples, "t": frames} | dict(zip(space, grid, strict=True))
    with _new(path) as f:
        for name, shape in shapes.items():
            time = ("t",) if len(shape) > len(grid) else ()
            _create(f, name, ("sample", *time, *space), sizes)
        columns, count = {}, 0
        for row in itertools.chain([first], rows):
            for name, value in row.items():
                if name not in shapes:
                    columns.setdefault(name, []).append(value)
                    continue
                if value.shape != shapes[name]:
                    raise UsageError(f"{path}: {name} of trajectory {count} has shape "
                                     f"{value.shape}, that of the first {shapes[name]}.")
                if len(f[name]) == count:
                    f[name].resize(count + 1, 0)
                f[name][count] = value
            count += 1
        sizes["sample"] = count
        for name, value in given.items():
            lead = value.shape[:value.ndim - len(grid)]
            lead = {(): (), (count, frames): ("sample", "t"), (frames,): ("t",),
                    (count,): ("sample",)}.get(lead)  # samples, where both fit
            if lead is None or value.shape[value.ndim - len(grid):] != (*grid,):
                raise UsageError(f"{path}: input {name} has shape {value.shape}, where ([{count},] "
                                 f"[{frames},] {', '.join(map(str, grid))}) is expected.")
            _create(f, name, (*lead, *space), sizes)[...] = value
        _finish(f, path, sizes, t, points, params | columns, facts)
    return path


def convert(src, dst, axes="", said=None):
    """Write any readable data set as own HDF5, piece by piece; return the paths.

    Where it has several files, `dst` is a folder, with folders for its splits.
    """
    src, dst = Path(src), Path(dst)
    with _unpacked(src, dst.parent) as source:
        (files,) = find((source,), (), axes, said).values()
        if len(files) > 1 and dst.suffix:
            raise UsageError(f"{src} has {len(files)} files; name a folder to write them to, not "
                             f"{dst}.")
        folders = {split: folder for folder, split in SPLITS.items()} | {"": ""}
        paths = [dst / folders[file.split] / f"{file.path.stem}.h5" if len(files) > 1 else dst
                 for file in files]
        for file, path in zip(files, paths, strict=True):
            _copy(file, path)
    return paths


def _copy(file, path):
    facts = file.facts
    sizes = {"sample": file.samples, "t": facts.frames} | dict(
        zip(facts.axes, facts.grid, strict=True))
    with _new(path) as f:
        for names, vary in ((facts.channels, True), (facts.inputs, facts.inputs_vary)):
            frames, time = (range(facts.frames), ("t",)) if vary else (range(1), ())
            for name in names:
                data = _create(f, name, ("sample", *time, *facts.axes), sizes)
                for rows, k in pieces(file.samples, len(frames), 4 * math.prod(facts.grid)):
                    block = file.read(range(file.samples)[rows], frames[k], 1, [name])[:, :, 0]
                    data[(rows, k) if vary else rows] = block if vary else block[:, 0]
        known = {key: value for key, value in facts.plain().items() if key in READ}
        params = dict(zip(facts.params, file.params.T, strict=True))
        _finish(f, path, sizes, file.times, {}, params, known)


def _by_name(row, facts, path):
    """One trajectory as {name: array}."""
    if isinstance(row, dict):
        return {name: np.asarray(value) for name, value in row.items()}
    row, channels = np.asarray(row), facts.get("channels", ())
    space = next((len(facts[key]) for key in ("axes", "boundary", "domain") if key in facts),
                 1 if row.ndim == 2 else None)
    if space is None and channels:  # one of one channel may have an axis for it
        space = row.ndim - 1 - (len(channels) > 1 or row.shape[1] == 1)
    if space is None:
        raise UsageError(f"{path}: a trajectory of shape {row.shape} may have a channel axis or "
                         "none; name the axes of space, such as axes='x y'.")
    if row.ndim == space + 1:
        row, channels = row[:, None], channels or ("u",)
    if row.ndim != space + 2:
        raise UsageError(f"{path}: a trajectory has shape {row.shape}, but there are {space} axes "
                         "of space; expected (T, *grid) or (T, C, *grid).")
    channels = channels or tuple(f"u{c}" for c in range(row.shape[1]))
    if len(channels) != row.shape[1]:
        raise UsageError(f"{path}: a trajectory has {row.shape[1]} channels, not "
                         f"{' '.join(channels)!r}.")
    return dict(zip(channels, row.swapaxes(0, 1), strict=True))


@contextlib.contextmanager
def _new(path):
    """A file that appears whole, once it reads back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with h5py.File(partial, "w") as f:
            yield f
        open_array(partial)
        flush(partial)
        partial.replace(path)
        flush(path.parent)
    except UsageError as error:
        raise UsageError(str(error).replace(str(partial), str(path))) from None
    finally:
        partial.unlink(missing_ok=True)


def _create(f, name, axes, sizes):
    """A variable over named axes; it grows where the number of samples is not known."""
    if name in f or name in sizes or name in READ:
        raise UsageError(f"{f.filename}: {name} names two things; rename the channel, input or "
                         "parameter.")
    shape, options = [sizes[axis] for axis in axes], {}
    if shape[0] is None:
        chunk = [1, *shape[1:]]  # a trajectory, or those of its frames that make a megabyte
        if axes[1] == "t":
            chunk[1] = min(shape[1], max(1, 2**18 // math.prod(shape[2:])))
        options = {"chunks": tuple(chunk), "maxshape": (None, *shape[1:])}
        shape[0] = 0
    f.create_dataset(name, shape, "f4" if len(axes) > 1 else "f8", **options)
    f[name].attrs["dims"] = " ".join(axes)
    return f[name]


def _finish(f, path, sizes, t, points, params, facts):
    """Write the axes, the parameters and the facts."""
    variables = [name for name in f]
    for name, value in params.items():
        value = np.asarray(value, np.float64)
        if value.shape not in ((), (sizes["sample"],)):
            raise UsageError(f"{path}: parameter {name} has shape {value.shape} for "
                             f"{sizes['sample']} samples.")
        _create(f, name, ("sample",), sizes)[...] = value
        variables.append(name)
    domain = facts.get("domain", ((0.0, 1.0),) * (len(sizes) - 2))
    ends = dict(zip([*sizes][2:], domain, strict=True))
    for axis, n in sizes.items():
        if axis == "t":
            values = np.arange(n) * facts.get("dt", 1.0) if t is None else np.asarray(t)
        elif axis == "sample":
            values = np.arange(n)
        else:
            low, high = ends[axis]
            values = points.get(axis, low + (np.arange(n) + 0.5) * (high - low) / n)
        f.create_dataset(axis, (n,), data=values).make_scale(axis)
    for name in variables:
        for k, axis in enumerate(f[name].attrs["dims"].split()):
            f[name].dims[k].attach_scale(f[axis])
    facts.pop("axes", None)  # the variables name them
    f.attrs.update(attributes({"name": path.stem} | facts | {"params": tuple(params)}))


@contextlib.contextmanager
def _unpacked(path, folder):
    """The path itself, or that of a copy that is not compressed."""
    packed = False
    if path.suffix.lower() == ".npz" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            packed = any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist())
    if not packed:
        yield path
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        copy = Path(place) / path.name
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
            for info in old.infolist():
                with old.open(info) as a, new.open(info.filename, "w", force_zip64=True) as b:
                    shutil.copyfileobj(a, b)
        if (beside := path.with_suffix(".yaml")).exists():
            shutil.copy(beside, place)
        yield copy
