"""Files that hold named arrays: HDF5 and netCDF-4, zarr, .npy and .npz, read when sliced."""

import contextlib
import math
import zipfile
from dataclasses import dataclass

import h5py
import numpy as np
import yaml

from ups.config import UsageError
from ups.data.said import READ, understand

SUFFIXES = (".h5", ".hdf5", ".nc", ".nc4", ".mat", ".npy", ".npz", ".zarr")
ROLES = {"samples": "sample", "batch": "sample", "trajectory": "sample", "t": "time",
         "channels": "channel"}


class Unrecognised(UsageError):
    """The file is not of this kind; the sentence says what was found and what is expected."""


@dataclass(frozen=True)
class Variable:
    """One stored array: names of its axes in stored order, and how numbers are packed in it."""

    name: str
    shape: tuple[int, ...]
    kind: str                        # of numpy's dtypes
    axes: tuple[str, ...] = ()       # empty: not known
    channels: tuple[str, ...] = ()   # names of its components
    fill: float | None = None        # stands for NaN
    factor: float = 1.0
    offset: float = 0.0
    row: int = 0                     # of an axis `row`: the variable is that row of a matrix

    def read(self, f, space, rows, frames, components, stride):
        """Canonical (n, T, C, *grid) of slices, 1 where the variable has no such axis."""
        at = {"sample": rows, "time": frames, "channel": components, "row": self.row}
        steps = [at.get(axis, slice(None, None, stride)) for axis in self.axes]
        last = slice(None)
        if self.axes[-1] in space:  # HDF5 is slow at strides along the fastest axis
            last, steps[-1] = steps[-1], slice(None)
        block = np.asarray(f[self.name][tuple(steps)])[..., last]
        if self.fill is not None or (self.factor, self.offset) != (1, 0):
            empty = np.False_ if self.fill is None else block == self.fill
            block = np.where(empty, np.nan, block * self.factor + self.offset)
        there = [axis for axis in self.axes if axis != "row"]
        order = ("sample", "time", "channel", *space)
        block = block.transpose([there.index(axis) for axis in order if axis in there])
        return block[tuple(slice(None) if axis in there else None for axis in order)]

    def __str__(self):
        return " ".join((self.name, *self.axes, str(self.shape)))


@contextlib.contextmanager
def opened(path):
    """The arrays of a file by name; nothing stays open."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise UsageError(f"{path}: there is no such file.")
    try:
        if is_zarr(path):
            f = contextlib.nullcontext(_zarr(path))
        elif suffix == ".npy":
            f = contextlib.nullcontext({"u": np.load(path, mmap_mode="r")})
        elif suffix == ".npz":
            f = contextlib.nullcontext(_npz(path))
        elif h5py.is_hdf5(path):
            f = h5py.File(path)
        else:
            raise Unrecognised(f"{path} is neither HDF5, netCDF-4, .npy, .npz nor zarr.")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise Unrecognised(f"{path} cannot be read ({' '.join(str(error).split())}).") from None
    with f as arrays:
        yield arrays


def is_zarr(path):
    return path.suffix == ".zarr" or (path / ".zgroup").exists() or (path / "zarr.json").exists()


def contents(f):
    """Variables, and attributes with the variables that stand for one: ([Variable], {name: value}).
    """
    variables, stored = [], dict(getattr(f, "attrs", {}))
    for name in f:
        item = f[name]
        if getattr(item, "shape", None) is None:  # a group, or empty
            continue
        text = item.dtype.kind in "OSTU"
        if item.shape in ((), (1, 1)) or name in READ and (text or name == "domain"):
            stored[name] = item[()]  # MATLAB's numbers are 1 x 1
            continue
        attrs = getattr(item, "attrs", {})
        if b"but not a netCDF variable" in np.bytes_(attrs.get("NAME", b"")):
            continue  # an axis without coordinate
        fill = attrs.get("_FillValue", attrs.get("missing_value"))
        fill = None if text or fill is None or np.size(fill) != 1 else np.ravel(fill)[0].item()
        numbers = (float(np.ravel(attrs.get(key, one))[0])
                   for key, one in (("scale_factor", 1), ("add_offset", 0)))
        words = understand({"axes": _axes(item, attrs, name),
                            "channels": attrs.get("channels", "")}, name)[0]
        axes = tuple(ROLES.get(word.lower(), word) for word in words["axes"])
        variables.append(Variable(name, tuple(item.shape), "S" if text else item.dtype.kind, axes,
                                  words["channels"], None if fill != fill else fill, *numbers))
    return variables, stored


def facts_beside(path):
    """What a YAML of the same name says."""
    path = path.with_suffix(".yaml") if path.is_file() else path.with_name(path.name + ".yaml")
    if not path.is_file():
        return path, {}
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected facts as `key: value`.")
    return path, values


def _axes(item, attrs, name):
    """Names of an array's axes, none where one is missing."""
    for key in ("dims", "_ARRAY_DIMENSIONS"):
        if key in attrs:
            return attrs[key]
    names = getattr(getattr(item, "metadata", None), "dimension_names", None) or ()
    if isinstance(item, h5py.Dataset):
        names = [name] if item.is_scale and item.ndim == 1 else [
            dim.label or (dim[0].name.rsplit("/", 1)[-1] if len(dim) else "") for dim in item.dims]
    return names if all(names) and len(names) == len(item.shape) else ()


def _zarr(path):
    try:
        import zarr
    except ImportError:
        raise UsageError(f"{path} is zarr; `pip install zarr` reads it.") from None
    return zarr.open_group(path, mode="r")


def _npz(path):
    """Arrays of an .npz, mapped where they lie."""
    out, form = {}, np.lib.format
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.compress_type != zipfile.ZIP_STORED:
                raise Unrecognised(f"{path} is compressed, which cannot be read lazily; `python -m "
                                   f"ups.data convert {path} {path.with_suffix('.h5')}` unpacks "
                                   "it.")
            file.seek(info.header_offset + 26)
            lengths = np.frombuffer(file.read(4), "<u2")
            file.seek(int(lengths.sum()), 1)
            old = form.read_magic(file) == (1, 0)
            read = form.read_array_header_1_0 if old else form.read_array_header_2_0
            shape, fortran, dtype = read(file)
            if dtype.hasobject:
                raise Unrecognised(f"{path}: {name} holds Python objects, not numbers.")
            if math.prod(shape):
                order = "F" if fortran else "C"
                out[name] = np.memmap(path, dtype, "r", file.tell(), shape, order)
    return out
