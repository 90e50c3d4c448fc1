"""Write fields as the project's own HDF5, which netCDF-4 readers open too.

One variable for each channel and input over the axes (sample, t, x, ..), which are dimension
scales; parameters over `sample`; facts as attributes (ups/data/facts.py).
"""

import contextlib
import itertools
import json
import math
import shutil
import tempfile
import zipfile
from pathlib import Path

import h5py
import numpy as np

from ups.config import DISK, UsageError
from ups.data.arrays import open_array
from ups.data.facts import READ, attributes, understand
from ups.data.file import pieces
from ups.data.find import find
from ups.data.well import SPLITS
from ups.files import flush, lock


def write_fields(path, u, *, t=None, channels=None, axes=None, boundary=None, params=None,
                 inputs=None, made=None, **facts):
    """Write trajectories and what is known of them; return the path.

    u: an array (N, T[, C], *grid), or an iterable of trajectories (T[, C], *grid). A trajectory may
    also be {name: array}: channels (T, *grid), `inputs` (then their names) ([T,] *grid), numbers;
    or a pair of an array and such a dictionary.
    t: times (T,), or say `dt`. params: {name: number or (N,)}. inputs: {name: ([N,] [T,] *grid)}.
    channels, axes (of space), boundary (of each) and any other fact: words, or as Facts has them.
    The points of an axis go by its name: `x=`. made: how, for JSON; `make` looks for it.
    """
    path = Path(path)
    given = dict(inputs) if isinstance(inputs, dict) else {}
    said = {"channels": channels, "axes": axes, "boundary": boundary, "inputs": [*given] or inputs}
    names = understand(said, path)[0].get("axes", ("x", "y", "z"))
    points = {name: facts.pop(name) for name in names if name in facts} | {"t": t}
    facts, params = understand(said | facts | {
        key: np.asarray(value) for key, value in (params or {}).items()}, path, strict=True)
    rows = (_by_name(row, facts, path) for row in u)
    if (first := next(rows, None)) is None:
        raise UsageError(f"{path}: there is no trajectory to write.")
    arrays = {name: value.shape for name, value in first.items() if value.ndim}
    facts.setdefault("channels", tuple(
        name for name in arrays if name not in facts.get("inputs", ())))
    if missing := [name for name in facts["channels"] if name not in arrays]:
        raise UsageError(f"{path}: there is no channel {missing[0]}; there are "
                         f"{', '.join(arrays)}.")
    frames, *grid = arrays[facts["channels"][0]]
    space = names if axes else names[:len(grid)]
    if len(space) != len(grid):
        raise UsageError(f"{path}: a trajectory has {len(grid)} axes of space, but the axes are "
                         f"{' '.join(space)!r}; name each.")
    sizes = {"sample": None, "t": frames} | dict(zip(space, grid, strict=True))
    with new_file(path, open_array) as f:
        for name, value in first.items():
            time = ("t",) * (value.ndim > len(grid))
            _create(f, name, ("sample", *time, *space) if value.ndim else ("sample",), sizes)
        for row, one in enumerate(itertools.chain([first], rows)):
            shapes = {name: value.shape for name, value in one.items()}
            if shapes != {name: f[name].shape[1:] for name in first}:
                raise UsageError(f"{path}: trajectory {row} has shapes {shapes}, which are not "
                                 "those of the first.")
            for name, value in one.items():
                f[name].resize(row + 1, 0)
                f[name][row] = value
        sizes["sample"] = row + 1
        for name, value in given.items():
            _create(f, name, _axes_of(value, name, space, sizes, path), sizes)[...] = value
        _finish(f, sizes, points, params, {"name": path.stem} | facts)
        if made:
            f.attrs["ups"] = json.dumps(made, sort_keys=True)
    return path


def _by_name(row, facts, path):
    """One trajectory as {name: array}."""
    row, more = row if isinstance(row, tuple) else (row, {})
    more = {name: np.asarray(value) for name, value in more.items()}
    if isinstance(row, dict):
        return {name: np.asarray(value) for name, value in row.items()} | more
    row, channels = np.asarray(row), facts.get("channels", ())
    space = next((len(facts[key]) for key in ("axes", "boundary", "domain") if key in facts),
                 1 if row.ndim == 2 else None)
    if space is None and channels:  # one of one channel may have an axis for it
        space = row.ndim - 1 - (len(channels) > 1 or row.shape[1] == 1)
    if space is None or row.ndim not in (space + 1, space + 2):
        raise UsageError(f"{path}: a trajectory of shape {row.shape} may have a channel axis or "
                         "none; name the axes of space, such as axes='x y'.")
    if row.ndim == space + 1:
        row, channels = row[:, None], channels or ("u",)
    channels = channels or tuple(f"u{c}" for c in range(row.shape[1]))
    if len(channels) != row.shape[1]:
        raise UsageError(f"{path}: a trajectory has {row.shape[1]} channels, not "
                         f"{' '.join(channels)!r}.")
    return dict(zip(channels, row.swapaxes(0, 1), strict=True)) | more


def _axes_of(value, name, space, sizes, path):
    """Those of an input that is given for all trajectories at once."""
    for lead in ((), ("sample",), ("t",), ("sample", "t")):
        if np.shape(value) == tuple(sizes[axis] for axis in (*lead, *space)):
            return *lead, *space
    grid = ", ".join(str(sizes[axis]) for axis in space)
    raise UsageError(f"{path}: input {name} has shape {np.shape(value)}, where "
                     f"([{sizes['sample']},] [{sizes['t']},] {grid}) is expected.")


def convert(src, dst, axes="", said=None, tasks=()):
    """Write any readable data set as own HDF5, piece by piece; return the paths.

    Where it has several files, `dst` is a folder, with folders for its splits.
    """
    src, dst = Path(src), Path(dst)
    with _unpacked(src, dst.parent) as source:
        found = find((source,), tasks, axes, said)
        if len(found) > 1:
            raise UsageError(f"{src} holds {', '.join(found)}; choose one by --tasks.")
        (files,) = found.values()
        if len(files) > 1 and dst.suffix:
            raise UsageError(f"{src} has {len(files)} files; name a folder to write them to, not "
                             f"{dst}.")
        folders = {split: folder for folder, split in SPLITS.items()} | {"": ""}
        paths = [dst / folders[file.split] / f"{file.path.stem}.h5" if len(files) > 1 else dst
                 for file in files]
        for file, path in zip(files, paths, strict=True):
            copy(file, path)
    return paths


def copy(file, path):
    """Write one file as own HDF5, piece by piece."""
    facts = file.facts
    sizes = {"sample": file.samples, "t": facts.frames} | dict(
        zip(facts.axes, facts.grid, strict=True))
    with new_file(path, open_array) as f:
        for name in (*facts.channels, *facts.inputs):
            vary = name in facts.channels or facts.inputs_vary
            frames = range(facts.frames if vary else 1)
            data = _create(f, name, ("sample", *("t",) * vary, *facts.axes), sizes)
            for rows, k in pieces(file.samples, len(frames), 4 * math.prod(facts.grid)):
                block = file.read(range(file.samples)[rows], frames[k], 1, [name])[:, :, 0]
                data[(rows, k) if vary else rows] = block if vary else block[:, 0]
        _finish(f, sizes, {"t": file.times}, dict(zip(facts.params, file.params.T, strict=True)),
                {key: value for key, value in facts.plain().items() if key in READ})


@contextlib.contextmanager
def _unpacked(path, folder):
    """The path itself, or that of a copy in `folder` that is not compressed."""
    if path.suffix.lower() != ".npz" or not zipfile.is_zipfile(path):
        yield path
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        new = Path(place) / path.name
        with zipfile.ZipFile(path) as packed, zipfile.ZipFile(new, "w") as plain:
            for one in packed.infolist():
                with packed.open(one) as a, plain.open(one.filename, "w", force_zip64=True) as b:
                    shutil.copyfileobj(a, b)
        if (beside := path.with_suffix(".yaml")).exists():
            shutil.copy(beside, place)
        yield new


@contextlib.contextmanager
def new_file(path, check=None):
    """An HDF5 file that appears whole, once `check(path)` has read it, or not at all."""
    partial = path.with_name(f"{path.name}.partial")  # a name that no reader takes
    held = lock(partial, "--out")  # HDF5 would empty the file first, then look for its own lock
    if held is None:
        raise UsageError(f"{path} is being written by another process; wait for it.")
    with held:
        try:
            with h5py.File(partial, "w", locking=False) as f:
                yield f
            if check:
                check(partial)
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        except UsageError as error:
            raise UsageError(str(error).replace(str(partial), str(path))) from None
        except (OSError, RuntimeError) as error:  # h5py: a RuntimeError on closing
            if getattr(error, "errno", None) not in DISK and "errno = " not in str(error):
                raise
            raise UsageError(f"{path} cannot be written ({' '.join(str(error).split())}); make "
                             "room, or choose another folder.") from None
        finally:
            partial.unlink(missing_ok=True)


def _create(f, name, axes, sizes):
    """A variable over named axes; it grows where the number of samples is not known."""
    if name in f or name in sizes or name in READ:
        raise UsageError(f"{f.filename}: {name} names two things; rename the channel, input or "
                         "parameter.")
    shape, options = [sizes[axis] for axis in axes], {}
    if shape[0] is None:
        chunk = [1, *shape[1:]] if shape[1:] else [1024]
        if "t" in axes:  # frames that make a megabyte
            chunk[1] = min(shape[1], max(1, 2**18 // math.prod(shape[2:])))
        options = {"chunks": tuple(chunk), "maxshape": (None, *shape[1:])}
        shape[0] = 0
    f.create_dataset(name, shape, "f4" if len(axes) > 1 else "f8", **options)
    f[name].attrs["dims"] = " ".join(axes)
    return f[name]


def _finish(f, sizes, points, params, facts):
    """Write the parameters, the points of the axes, and the facts."""
    for name, value in params.items():
        if np.shape(value) not in ((), (sizes["sample"],)):
            raise UsageError(f"{f.filename}: parameter {name} has shape {np.shape(value)} for "
                             f"{sizes['sample']} samples.")
        _create(f, name, ("sample",), sizes)[...] = value
    params = dict.fromkeys((*params, *(name for name in f if f[name].ndim == 1)))
    variables = list(f)
    space = [*sizes][2:]
    domain = facts.get("domain", ((0.0, 1.0),) * len(space))
    usual = {axis: low + (np.arange(sizes[axis]) + 0.5) * (high - low) / sizes[axis]
             for axis, (low, high) in zip(space, domain, strict=True)}
    usual |= {"t": np.arange(sizes["t"]) * facts.get("dt", 1.0),
              "sample": np.arange(sizes["sample"])}
    for axis, n in sizes.items():
        values = points.get(axis)
        f.create_dataset(axis, (n,), data=usual[axis] if values is None else values)
        f[axis].make_scale(axis)
    for name in variables:
        for k, axis in enumerate(f[name].attrs["dims"].split()):
            f[name].dims[k].attach_scale(f[axis])
    facts = {key: value for key, value in facts.items() if key != "axes"}  # variables name them
    f.attrs.update(attributes(facts | {"params": tuple(params)}))
