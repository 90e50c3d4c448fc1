"""The Well as it is published: NAME/data/{train,valid,test}/*.hdf5, one file per parameter set.

    dimensions           @spatial_dims; time ([N,] T) and the points of each axis
    t0_fields .. t2      @field_names; ([N,] [T,] *grid[, D[, D]]), @sample_varying @time_varying
    scalars              @field_names; the same without a grid
    boundary_conditions  groups with @associated_dims, @bc_type and a mask over those axes

Components are channels (`velocity_x`, `D_xy`). What does not vary in time is an input, and so is a
scalar that does; other scalars are parameters. The folder says the split.
"""

import itertools

import h5py
import numpy as np

from ups.data.facts import words
from ups.data.file import found
from ups.data.stores import HDF5, Variable, opened

SPLITS = {"train": "train", "val": "val", "valid": "val", "test": "test"}  # of folders
GROUPS = {"dimensions", "t0_fields", "t1_fields", "t2_fields"}


def open_well(path):
    """The files of a folder NAME or NAME/data, or one file: [File, ..]; empty for other layouts."""
    if path.is_file():
        paths = [("", path)]  # a file by itself says no split
    else:
        paths = [(SPLITS[folder], one) for root in (path, path / "data") for folder in SPLITS
                 for one in sorted((root / folder).glob("*")) if one.suffix in HDF5]
    for _, one in paths[:1]:
        if not h5py.is_hdf5(one):
            return []
        with opened(one) as f:
            if not {*f} >= GROUPS:
                return []
    return [_open(one, split) for split, one in paths]


def _open(path, split):
    channels, inputs, params = {}, {}, {}
    with opened(path) as f:
        space = words(f["dimensions"].attrs["spatial_dims"])
        points = {axis: np.atleast_2d(f[f"dimensions/{axis}"][()])[0] for axis in space}
        points["time"] = f["dimensions/time"][()]
        sizes = {axis: values.shape[-1] for axis, values in points.items()}
        for rank in range(3):
            for name in words(f[f"t{rank}_fields"].attrs["field_names"]):
                item = f[f"t{rank}_fields/{name}"]
                named = [f"{name}_{''.join(axes)}" if axes else name
                         for axes in itertools.product(space, repeat=rank)]
                place = channels if item.attrs["time_varying"] else inputs
                place |= zip(named, _components(item, rank, space), strict=True)
        for name in words(f["scalars"].attrs["field_names"]) if "scalars" in f else ():
            item = f[f"scalars/{name}"]
            if item.attrs.get("time_varying", False):
                inputs[name], = _components(item, 0, ())
            else:
                params[name] = item[()]
        for name in words(f.attrs.get("simulation_parameters", "")):
            params.setdefault(name, f.attrs[name])
        facts = {"name": "_".join(words(f.attrs["dataset_name"])),
                 "boundary": tuple(_boundary(f, axis) for axis in space)}
        return found(path, sizes | {"sample": int(f.attrs["n_trajectories"])}, channels, inputs,
                     points, params, facts, split=split)


def _components(item, rank, space):
    """(variable, component) of each number at a point, rows first."""
    axes = [axis for axis, key in (("sample", "sample_varying"), ("time", "time_varying"))
            if item.attrs.get(key, False)]
    varying = item.attrs.get("dim_varying", np.ones(len(space)))[:len(space)]
    full = len(axes) + len(space) + rank == item.ndim  # else axes that do not vary are absent
    axes += [axis for axis, yes in zip(space, varying, strict=True) if yes or full]
    axes += [(), ("channel",), ("row", "channel")][rank]
    for row in range(len(space) if rank == 2 else 1):
        one = Variable(item.name.lstrip("/"), item.shape, item.dtype.kind, tuple(axes), row=row)
        yield from ((one, component) for component in range(len(space) if rank else 1))


def _boundary(f, axis):
    """Periodic where a condition along the axis says so, closed by any other, "" without one."""
    kinds = set()
    for name in f.get("boundary_conditions", ()):
        one = f[f"boundary_conditions/{name}"]
        dims = words(one.attrs["associated_dims"])
        if axis in dims:
            kind = " ".join(words(one.attrs["bc_type"])).upper()
            if kind == "PERIODIC" and len(dims) > 1:  # of another axis, or of both
                mask = f[f"boundary_conditions/{name}/mask"][()]
                kind = kind if mask.take(0, dims.index(axis)).all() else "OPEN"
            kinds.add(kind)
    return "periodic" if "PERIODIC" in kinds else "closed" if kinds else ""
