"""The Well as it is published: NAME/data/{train,valid,test}/*.hdf5, one file per parameter set.

    dimensions           @spatial_dims; time ([N,] T) and the points of each axis
    t0_fields .. t2      @field_names; ([N,] [T,] *grid[, D[, D]]), @sample_varying @time_varying
    scalars              @field_names; the same without a grid
    boundary_conditions  groups with @associated_dims, @bc_type and a mask over those axes

Components are channels (`velocity_x`, `D_xy`). What does not vary in time is an input, and so is a
scalar that does; other scalars are parameters. The folder says the split.
"""

import contextlib
import itertools
from pathlib import Path

import h5py
import numpy as np

from ups.config import UsageError
from ups.data.arrays import SPLITS, Array, ends, even_times
from ups.data.facts import Facts
from ups.data.said import understand
from ups.data.stores import Unrecognised, Variable

GROUPS = {"dimensions", "t0_fields", "t1_fields", "t2_fields"}
ENDINGS = (".hdf5", ".h5")


def is_well(path):
    """Whether a file, or the first one of a folder, has the groups of The Well."""
    with contextlib.suppress(OSError):
        for _, one in _paths(Path(path))[:1]:
            with h5py.File(one) as f:
                return {*f} >= GROUPS
    return False


def open_well(path):
    """The files of a folder NAME or NAME/data, or one file: [File, ..]."""
    if not (paths := _paths(Path(path))):
        raise Unrecognised(f"{path}: no folders train, valid and test with .hdf5 files, as The "
                           "Well has them.")
    return [_open(one, split) for split, one in paths]


def _paths(path):
    """[(split, file), ..] below a folder; a file by itself says no split."""
    if path.is_file():
        return [("", path)] if path.suffix in ENDINGS else []
    for root in (path, path / "data"):
        if found := [(split, one) for folder, split in SPLITS.items()
                     for one in sorted((root / folder).glob("*")) if one.suffix in ENDINGS]:
            return found
    return []


def _open(path, split):
    with h5py.File(path) as f:
        if missing := sorted(GROUPS - {*f}):
            raise Unrecognised(f"{path}: no file of The Well; it has no group {missing[0]}, but "
                               f"{', '.join(f) or 'nothing'}.")
        try:
            return _read(path, f, split)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UsageError(f"{path}: not as The Well writes its files "
                             f"({' '.join(str(error).split())}).") from None


def _read(path, f, split):
    dimensions, warnings = f["dimensions"], []
    space = _names(dimensions, "spatial_dims")
    points = [np.atleast_2d(dimensions[axis][()])[0] for axis in space]
    times, dt = even_times(dimensions["time"][()], path)
    grid = tuple(map(len, points))
    samples = int(f.attrs["n_trajectories"])
    sizes = {"sample": samples, "time": len(times), **dict(zip(space, grid, strict=True))}

    channels, inputs, vectors = {}, {}, []
    for rank in range(3):
        group = f[f"t{rank}_fields"]
        for name in _names(group, "field_names"):
            varies = group[name].attrs
            named = [f"{name}_{''.join(axes)}" if axes else name
                     for axes in itertools.product(space, repeat=rank)]
            if rank == 1:
                vectors.append(tuple(named))
            place = channels if varies["time_varying"] else inputs
            place |= zip(named, _components(group[name], rank, space, sizes), strict=True)
    params, found = {}, f.get("scalars", {})
    for name in _names(found, "field_names") if found else ():
        value = found[name]
        if value.attrs.get("time_varying", False):
            inputs[name], = _components(value, 0, (), sizes)
        else:
            params[name] = value[()]
    for name in _names(f, "simulation_parameters"):
        params.setdefault(name, f.attrs[name])
    params = {name: np.broadcast_to(np.asarray(value, np.float64).ravel() if np.ndim(value)
                                    else value, samples) for name, value in params.items()}
    facts = Facts(
        name="_".join(str(f.attrs["dataset_name"]).split()), channels=tuple(channels),
        inputs=tuple(inputs), inputs_vary=any("time" in one.axes for one, _ in inputs.values()),
        axes=space, grid=grid, boundary=tuple(_boundary(f, axis) for axis in space),
        domain=tuple(ends(x, axis, warnings) for x, axis in zip(points, space, strict=True)),
        dt=dt, frames=len(times), params=tuple(params), vectors=tuple(vectors))
    values = np.array([*params.values()], np.float64).reshape(len(params), samples).T
    return Array(path, facts, samples, times, values, split=split, warnings=tuple(warnings),
                 sources=(*channels.values(), *inputs.values()))


def _components(item, rank, space, sizes):
    """(variable, component) of each number at a point, rows first."""
    axes = [axis for axis, key in (("sample", "sample_varying"), ("time", "time_varying"))
            if item.attrs.get(key, False)]
    varying = item.attrs.get("dim_varying", np.ones(len(space)))[:len(space)]
    full = len(axes) + len(space) + rank == item.ndim  # else axes that do not vary are absent
    axes += [axis for axis, yes in zip(space, varying, strict=True) if yes or full]
    axes += [(), ("channel",), ("row", "channel")][rank]
    for axis, n in zip(axes, item.shape, strict=True):
        if n not in (1, sizes.get(axis, len(space))):
            raise ValueError(f"{item.name} has shape {item.shape} over {' '.join(axes)}")
    name, count = item.name.lstrip("/"), len(space) if rank else 1
    for row in range(len(space) if rank == 2 else 1):
        one = Variable(name, item.shape, item.dtype.kind, tuple(axes), row=row)
        yield from ((one, component) for component in range(count))


def _boundary(f, axis):
    """Periodic where a condition along the axis says so, closed by any other, "" without one."""
    kinds = set()
    for one in f.get("boundary_conditions", {}).values():
        dims = _names(one, "associated_dims")
        if axis in dims:
            kind = understand({"name": one.attrs["bc_type"]}, f.filename)[0]["name"].upper()
            if kind == "PERIODIC" and len(dims) > 1:  # of another axis, or of both
                kind = kind if one["mask"][()].take(0, dims.index(axis)).all() else "OPEN"
            kinds.add(kind)
    return "periodic" if "PERIODIC" in kinds else "closed" if kinds else ""


def _names(group, key):
    """Words of an attribute, which may be text, a list, or an empty array of numbers."""
    return understand({"channels": group.attrs.get(key, "")}, group.name)[0]["channels"]
