"""Files that hold named arrays, read when sliced: HDF5 and netCDF-4, zarr, .npy and .npz.

An HDF5 file may refer to bytes anywhere on the machine that reads it, so arrays that lie in another
file are refused, and no object is unpickled.
"""

import contextlib
import math
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import h5py
import numpy as np
import yaml

from ups.config import UsageError
from ups.data.facts import READ, understand

HDF5 = (".h5", ".hdf5")
SUFFIXES = (*HDF5, ".nc", ".nc4", ".mat", ".npy", ".npz", ".zarr")
ROLES = {"samples": "sample", "batch": "sample", "trajectory": "sample", "t": "time",
         "channels": "channel"}  # other words for the axes that are not of space
UNREADABLE = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError,
              zipfile.BadZipFile, yaml.YAMLError)


class Unrecognised(UsageError):
    """The file is not of this kind; the sentence says what was found and what is expected."""


@dataclass(frozen=True)
class Variable:
    """One stored array: names of its axes in stored order, and how numbers are packed in it."""

    name: str
    shape: tuple[int, ...]
    kind: str = "f"                  # of numpy's dtypes
    axes: tuple[str, ...] = ()       # empty: not known
    channels: tuple[str, ...] = ()   # names of its components
    fill: float | None = None        # stands for NaN
    factor: float = 1.0
    offset: float = 0.0
    row: int = 0                     # of an axis `row`: that row alone is meant
    groups: tuple[str, ...] = field(default=(), repr=False)  # one for each sample, if any

    def read(self, f, space, rows, frames, components, stride):
        """Canonical (n, T, C, *grid) of slices, 1 where the variable has no such axis."""
        if self.groups:
            return np.concatenate([
                replace(self, name=f"{group}/{self.name}", groups=()).read(
                    f, space, rows, frames, components, stride) for group in self.groups[rows]])
        item = f[self.name]
        if item.shape != self.shape:
            raise ValueError(f"{self.name} has shape {item.shape}, not {self.shape}")
        at = {"sample": rows, "time": frames, "channel": components,
              "row": slice(self.row, self.row + 1)}
        steps = [at.get(axis, slice(None, None, stride)) for axis in self.axes]
        thin = [slice(None)] * len(steps)
        if fast := [k for k, axis in enumerate(self.axes) if axis in space][-1:]:
            k, = fast  # HDF5 is slow at strides along a fast axis
            steps[k], thin[k] = thin[k], steps[k]
        block = np.asarray(item[tuple(steps)])[tuple(thin)]
        if self.fill is not None or (self.factor, self.offset) != (1, 0):
            empty = np.False_ if self.fill is None else block == self.fill
            block = np.where(empty, np.nan, block * self.factor + self.offset)
        order = ("row", "sample", "time", "channel", *space)
        block = block.transpose([self.axes.index(axis) for axis in order if axis in self.axes])
        return block[tuple(slice(None) if axis in self.axes else None for axis in order)][0]

    def __str__(self):
        return " ".join((self.name, *self.axes, str(self.shape)))


class _HDF5(h5py.File):
    def __getitem__(self, name):
        item = super().__getitem__(name)
        folder = Path(self.filename).resolve().parent
        inside = item.file.filename == self.filename  # else an external link
        if inside and isinstance(item, h5py.Dataset):
            inside = not item.external and not (item.is_virtual and any(
                folder not in (folder / source.file_name).resolve().parents
                for source in item.virtual_sources() if source.file_name != "."))
        if not inside:
            raise UsageError(f"{self.filename}: {name} lies in another file, which is not "
                             "followed; copy its values into this one.")
        return item


@contextlib.contextmanager
def opened(path):
    """The arrays of a file by name; nothing stays open, and a fault is one sentence."""
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: there is no such file.")
    try:
        with _open(path) as arrays:
            yield arrays
    except UNREADABLE as error:
        raise Unrecognised(f"{path} cannot be read ({' '.join(str(error).split())}).") from error


def _open(path):
    if is_zarr(path):
        try:
            import zarr
        except ImportError:
            raise UsageError(f"{path} is zarr; `pip install zarr` reads it.") from None
        return contextlib.nullcontext(zarr.open_group(path, mode="r"))
    if path.suffix.lower() == ".npy":
        return contextlib.nullcontext({"u": np.load(path, mmap_mode="r", allow_pickle=False)})
    if path.suffix.lower() == ".npz":
        return contextlib.nullcontext(_npz(path))
    if path.suffix.lower() in SUFFIXES or path.is_file() and h5py.is_hdf5(path):
        try:
            return _HDF5(path)
        except OSError as error:  # some file systems have no locks, and nothing is written
            if "lock" not in str(error):
                raise
            return _HDF5(path, locking=False)
    raise Unrecognised(f"{path} is neither HDF5, netCDF-4, .npy, .npz nor zarr.")


def is_zarr(path):
    return path.suffix == ".zarr" or (path / ".zgroup").exists() or (path / "zarr.json").exists()


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


def contents(f):
    """([Variable], {name: value}): arrays, and the attributes and scalars that may be facts."""
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
        words, _ = understand({"axes": _axes(item, attrs, name),
                               "channels": attrs.get("channels", "")}, name)
        axes = tuple(ROLES.get(word.lower(), word) for word in words["axes"])
        variables.append(Variable(name, tuple(item.shape), "S" if text else item.dtype.kind, axes,
                                  words["channels"], None if fill != fill else fill, *numbers))
    return variables, stored


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
