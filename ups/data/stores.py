"""Files that hold named arrays, read when sliced: HDF5 and netCDF-4, zarr, .npy and .npz.

An HDF5 file may refer to bytes anywhere on the machine that reads it. So arrays that lie outside of
its folder are refused, and no object is unpickled.
"""

import contextlib
import math
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import yaml

from ups.config import UsageError
from ups.data.facts import READ, words

HDF5 = (".h5", ".hdf5")
SUFFIXES = (*HDF5, ".nc", ".nc4", ".mat", ".npy", ".npz", ".zarr")
ROLES = {"samples": "sample", "batch": "sample", "trajectory": "sample", "t": "time",
         "channels": "channel"}  # other words for the axes that are not of space ..
SHORT = ROLES | {"b": "sample", "c": "channel", "sample": "sample", "time": "time",
                 "channel": "channel"}  # .. and where somebody says them
CURES = {".mat": "save it with -v7.3", ".nc": "store it as netCDF-4",
         ".npy": "write it again, as an array of numbers"}
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
    packing: tuple = (None, 1.0, 0.0)  # the value that stands for NaN, factor and offset
    row: int = 0                     # of an axis `row`: that row alone is meant
    groups: tuple[str, ...] = ()     # one for each sample, if any

    def read(self, f, space, rows, frames, components, stride):
        """Canonical (n, T, C, *grid) of slices, 1 where the variable has no such axis."""
        if self.groups:
            return np.concatenate([
                replace(self, name=f"{group}/{self.name}", groups=()).read(
                    f, space, rows, frames, components, stride) for group in self.groups[rows]])
        item = f[self.name]
        if item.shape != self.shape:
            raise ValueError(f"{self.name} has shape {item.shape}, not {self.shape}")
        at = {"sample": rows, "time": slice(frames.start, frames.stop, frames.step),
              "channel": components, "row": slice(self.row, self.row + 1)}
        thin = {axis: slice(None, None, stride) for axis in space}
        last = [axis for axis in self.axes if axis in space][-1:]  # HDF5 is slow at strides of it
        at |= {axis: thin[axis] for axis in space if axis not in last}
        u = np.asarray(item[tuple(at.get(axis, slice(None)) for axis in self.axes)])
        u = u[tuple(thin[axis] if axis in last else slice(None) for axis in self.axes)]
        if self.packing != (None, 1, 0):
            fill, factor, offset = self.packing
            u = np.where(u == fill, np.nan, u * factor + offset)
        order = ("row", "sample", "time", "channel", *space)
        u = u.transpose([self.axes.index(axis) for axis in order if axis in self.axes])
        return u[tuple(slice(None) if axis in self.axes else None for axis in order)][0]

    def __str__(self):
        return " ".join((self.name, *self.axes, str(self.shape)))


class _HDF5(h5py.File):
    def __init__(self, path):
        try:
            super().__init__(path, locking=False)  # some file systems have no locks
        except OSError as error:
            if "locking flag" not in str(error):
                raise
            super().__init__(path)  # as this process has opened it elsewhere

    def __getitem__(self, name):
        item, folder = super().__getitem__(name), Path(self.filename).resolve().parent
        inside = item.file.filename == self.filename and not getattr(item, "external", None)
        for other, key in {(source.file_name, source.dset_name) for source in (
                item.virtual_sources() if getattr(item, "is_virtual", False) else ())}:
            path = Path(self.filename if other == "." else folder / other)
            if inside := inside and folder in path.resolve().parents:
                with _HDF5(path) as f:
                    f[key]  # which may lie elsewhere in turn
        if not inside:
            raise UsageError(f"{self.filename}: {name} lies in another file, which is not "
                             "followed; copy its values into this one.")
        return item


@contextlib.contextmanager
def opened(path):
    """The arrays of a file by name; nothing stays open, and a fault is one sentence."""
    path = Path(path)
    suffix = path.suffix.lower()
    if not path.exists():
        raise UsageError(f"{path}: there is no such file.")
    try:
        if is_zarr(path):
            import zarr
            from numcodecs.registry import codec_registry

            codec_registry.pop("pickle", None)  # older versions unpickle where a file asks for it
            item = zarr.open(path, mode="r")
            yield {"u": item} if isinstance(item, zarr.Array) else item
        elif suffix == ".npy":
            yield {"u": np.load(path, mmap_mode="r", allow_pickle=False)}
        elif suffix == ".npz":
            yield _npz(path)
        elif suffix in SUFFIXES or h5py.is_hdf5(path):
            with _HDF5(path) as f:
                yield f
        else:
            raise Unrecognised(f"{path} is neither HDF5, netCDF-4, .npy, .npz nor zarr; store it "
                               "as one of them.")
    except ImportError:
        raise UsageError(f"{path} is zarr; `pip install zarr` reads it.") from None
    except UNREADABLE as error:
        cure = CURES.get("" if h5py.is_hdf5(path) else suffix, "write or copy it again")
        raise Unrecognised(f"{path} cannot be read ({' '.join(str(error).split())}); {cure}."
                           ) from error


def is_zarr(path):
    return path.suffix == ".zarr" or (path / ".zgroup").exists() or (path / "zarr.json").exists()


def _npz(path):
    """Arrays of an .npz, mapped where they lie."""
    out, form = {}, np.lib.format
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise Unrecognised(f"{path} is compressed, which cannot be read lazily; `python -m "
                                   f"ups.data convert {path} {path.with_suffix('.h5')}` unpacks "
                                   "it.")
            file.seek(info.header_offset + 26)
            file.seek(int(np.frombuffer(file.read(4), "<u2").sum()), 1)
            old = form.read_magic(file) == (1, 0)
            read = form.read_array_header_1_0 if old else form.read_array_header_2_0
            shape, fortran, dtype = read(file)
            if dtype.hasobject:
                raise Unrecognised(f"{path}: {info.filename} holds Python objects, not numbers.")
            if math.prod(shape):
                out[info.filename.removesuffix(".npy")] = np.memmap(
                    path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
    return out


def contents(f):
    """([Variable], {name: value}): arrays, and the attributes and scalars that may be facts."""
    variables, stored = [], dict(getattr(f, "attrs", {}))
    for name in f:
        item = f[name]
        if getattr(item, "shape", None) is None:  # a group, or empty
            continue
        kind, attrs = item.dtype.kind, getattr(item, "attrs", {})
        kind = "S" if kind in "OTU" else kind
        if item.shape in ((), (1, 1)) or name == "domain" or kind == "S" and name in (
                *READ, "channel"):  # MATLAB's numbers are 1 x 1
            stored["channels" if name == "channel" else name] = item[()]
        elif b"but not a netCDF variable" not in np.bytes_(attrs.get("NAME", b"")):
            fill = np.ravel(attrs.get("_FillValue", attrs.get("missing_value", np.nan)))[0]
            packing = None if kind == "S" or fill != fill else fill.item(), *(
                float(np.ravel(attrs.get(key, one))[0])
                for key, one in (("scale_factor", 1), ("add_offset", 0)))
            names = [name] if getattr(item, "is_scale", False) and item.ndim == 1 else [
                dim.label or (dim[0].name.rsplit("/", 1)[-1] if len(dim) else "")
                for dim in getattr(item, "dims", ())]
            names = getattr(getattr(item, "metadata", None), "dimension_names", None) or names
            names = attrs.get("dims", attrs.get("_ARRAY_DIMENSIONS", names if all(names) else ()))
            axes = tuple(ROLES.get(word.lower(), word) for word in words(names))
            axes = axes if len(axes) == len(item.shape) else ()
            variables.append(Variable(name, tuple(item.shape), kind, axes,
                                      words(attrs.get("channels", "")), packing))
    return variables, stored
