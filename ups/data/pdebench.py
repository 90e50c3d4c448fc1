"""The eleven HDF5 layouts of PDEBench: told apart by content, read lazily, written for seven tasks.

    flat     one data set per channel (N, T, *grid); `x-coordinate`, ..., `t-coordinate` (T or T+1);
             parameters are attributes                       advection burgers reacdiff cns1d/2d/3d
    steady   `nu` (N, n, n) is the coefficient a, `tensor` (N, 1, n, n) the solution u      darcy2d
    groups   one group per sample, `0000/data` (T, *grid, C), `0000/grid/{x,y,t}`, YAML text in the
             attribute `config`                                      diffsorp1d diffreact2d swe2d
    last     `velocity` (N, T, n, n, 2), perhaps `particles` (N, T, n, n, 1), `t` (N, T), `force`
             (N, n, n, 2), YAML text in `config`                                               ns2d

Whatever the layout, a `File` (file.py) reads as (n, T, C, *grid). A steady file has the two frames
(a, 0) and (a, u). Test samples are the first or the last tenth, as published.
"""

import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import yaml

from ups.config import UsageError
from ups.data.file import File
from ups.data.tasks import TASKS


class UnknownLayout(UsageError):
    """A sound HDF5 file that is none of the eleven."""


def identify(path):
    """The task whose layout a file has, by its keys, shapes and attributes."""
    with _opened(path) as f:
        return _identify(f, path)


def open_file(path):
    """Read the header of a file of any of the eleven layouts."""
    with _opened(path) as f:
        name = _identify(f, path)
        task, groups = TASKS[name], ()
        if task.layout == "groups":
            groups = tuple(sorted((key for key in f if key.isdigit()), key=int))
            samples, (frames, *grid, _) = len(groups), f[groups[0]]["data"].shape
            if (kind := f[groups[0]]["data"].dtype).kind not in "fiu":
                raise UsageError(f"{path}: {groups[0]}/data holds no real numbers, but {kind}.")
        else:
            samples, frames, *grid = _shape(f, task, path)
        if task.layout == "steady":
            frames, times = 2, np.arange(2.0)
        else:
            times = _coordinate(f, groups, "t")
        if not (samples and frames) or times is None or len(times) not in (frames, frames + 1):
            raise UsageError(f"{path}: {samples} samples of {frames} frames need as many times, or "
                             "one more, in `t-coordinate`, `t` or `grid/t`; the file is damaged.")
        said = _said(f, groups)
        params = {key: said.get(key.lower(), value) for key, value in task.params.items()}
        for key, value in params.items():
            try:
                params[key] = float(value)
                if not 0 <= params[key] < math.inf:
                    raise ValueError
            except (TypeError, ValueError):
                what = (f"is missing; set it with h5py: f.attrs['{key}'] = value" if value is None
                        else f"is {value!r}; it is a number not below 0: models take its logarithm")
                raise UsageError(f"{path}: the attribute {key} of {name} {what}.") from None
        known = zip(grid, (_coordinate(f, groups, axis) for axis in task.axes), strict=True)
        ends = [task.domain if x is None else _ends(x[:n]) for n, x in known]
        domain = _domain(said.get("domain", ends), task, path)
        channels = task.channels + (("particles",) if "particles" in f else ())
        attributes = {key: str(value) for key, value in sorted(f.attrs.items())}
        file = File(Path(path), name, samples, frames, tuple(grid), channels, params,
                    said.get("boundary", task.boundary), domain, attributes,
                    times[:frames].astype(np.float64), groups)
    if file.boundary is None:
        jump = max(seam(file, range(0, samples, 1 + samples // 32)))
        file = replace(file, boundary="periodic" if jump < SEAM else "closed")
    return file


def uneven(file):
    """What is wrong with the coordinates of space and time: {axis: phrase}."""
    found, t, steps = {}, file.times, np.diff(file.times)
    usual = np.median(steps) if len(steps) else 0.0
    rounded = 0.01 * usual + 1e-6 * abs(t).max()
    for k in np.flatnonzero(~((steps > 0) & (abs(steps - usual) < rounded)))[:1]:
        found["t"] = (f"does not increase evenly from frame {k} to {k + 1} ({t[k]:g} to "
                      f"{t[k + 1]:g}): interpolate the fields first")
    with _opened(file.path) as f:
        for axis, n in zip(TASKS[file.task].axes, file.grid, strict=True):
            x = _coordinate(f, file.groups, axis)
            if x is not None and len(x) not in (n, n + 1):
                found[axis] = f"has {len(x)} coordinates for {n} points"
            elif x is not None and not np.allclose(np.diff(x), np.diff(x).mean(), rtol=0.01):
                found[axis] = "is not evenly spaced: interpolate the fields first"
    return found


SEAM = 3.0  # a jump across the seam above three times the jumps inside is no periodic field


def seam(file, rows):
    """Rms jump across the ends of each space axis over the rms jump inside, at the last frame.

    About 1 where the axis is periodic, large where the two ends do not know of each other.
    """
    kept = []
    for row in rows:
        with suppress(UsageError):  # one that cannot be read is told by who needs it
            kept.append(file.read([row], range(file.frames - 1, file.frames)))
    if not kept:
        return [0.0]
    u = np.concatenate(kept)
    u = u[np.isfinite(u).all(axis=tuple(range(1, u.ndim)))]
    u = u / (u.std(axis=(0, 1, *range(3, u.ndim)), keepdims=True) + 1e-30)
    ratios = []
    for axis in range(3, u.ndim):
        v = np.moveaxis(u, axis, -1)
        inside, across = np.square(np.diff(v)).mean(), np.square(v[..., 0] - v[..., -1]).mean()
        ratios.append(float(np.sqrt(across / (inside + 1e-30))))
    return ratios


@contextmanager
def _opened(path):
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path} is a folder; give a file in it." if path.is_dir() else
                         f"{path}: there is no such file.")
    if path.suffix == ".partial":
        raise UsageError(f"{path}: left by a run that was stopped; make it again.")
    try:
        f = h5py.File(path)
    except OSError as error:
        what = "truncated HDF5" if "truncated" in str(error) else "not a readable HDF5 file"
        raise UsageError(f"{path}: {what} ({error}); download or make it again.") from None
    try:
        with f:
            yield f
    except (OSError, ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: the header is damaged ({' '.join(str(error).split())}); "
                         "download or make it again.") from error


_KEYS = ("tensor", "nu", "density", "pressure", "Vx", "Vy", "Vz", "velocity", "t")


def _identify(f, path):
    attributes = {key.lower() for key in f.attrs}
    ndim = {key: f[key].ndim for key in _KEYS if isinstance(f.get(key), h5py.Dataset)}
    if ndim.get("tensor") == 3:
        for name, wanted in (("reacdiff1d", {"nu", "rho"}), ("burgers1d", {"nu"}),
                             ("advection1d", {"beta"})):
            if wanted <= attributes:
                return name
    if ndim.get("tensor") == 4 and ndim.get("nu") == 3:
        return "darcy2d"
    for name in ("cns1d", "cns2d", "cns3d"):
        if all(ndim.get(key) == 2 + len(TASKS[name].axes) for key in TASKS[name].channels):
            return name  # a file of fewer axes may still carry Vz
    if ndim.get("velocity") == 5 and "t" in ndim:
        return "ns2d"
    group = next((f[key] for key in f if key.isdigit()), None)
    if group is not None and "data" in group:
        shape = group["data"].shape
        for name in ("diffsorp1d", "diffreact2d", "swe2d"):
            task = TASKS[name]
            if len(shape) == 2 + len(task.axes) and shape[-1] == len(task.channels):
                return name
    raise UnknownLayout(
        f"{path}: unknown layout; looked for `tensor` (N,T,x) with attribute beta or Nu, `tensor` "
        "with `nu`, `density` with `pressure` and `Vx`, `velocity` with `t`, groups `0000/data` "
        f"(T,x,1), (T,y,x,1) or (T,y,x,2); found {', '.join(list(f)[:6]) or 'nothing'}.")


def _shape(f, task, path):
    """(N, T, *grid) of a file that is not in groups: that of all its data sets."""
    names = {"steady": ("nu", "tensor"), "last": ("velocity", "particles")}.get(
        task.layout, task.channels if len(task.channels) > 1 else ("tensor",))
    sets = {key: f[key] for key in names if key in f}
    shapes = {(one.shape[:1] + (1,) * (key == "nu") + one.shape[1:])[:2 + len(task.axes)]
              for key, one in sets.items()}
    last = {"velocity": 2, "particles": 1}
    if len(shapes) > 1 or any(one.dtype.kind not in "fiu" or one.shape[-1] != last.get(
            key, one.shape[-1]) for key, one in sets.items()):
        found = ", ".join(f"{key} {one.dtype} {one.shape}" for key, one in sets.items())
        raise UsageError(f"{path}: {found} do not hold numbers of one shape (velocity with two "
                         "components); the file is damaged.")
    return shapes.pop()


def _domain(ends, task, path):
    """Two increasing numbers for each space axis."""
    try:
        domain = tuple((float(low), float(high)) for low, high in ends)
    except (TypeError, ValueError):
        domain = ()
    if len(domain) != len(task.axes) or not all(-math.inf < a < b < math.inf for a, b in domain):
        raise UsageError(f"{path}: coordinates, or the attribute `domain`, are not two increasing "
                         f"numbers for {', '.join(task.axes)}: {' '.join(str(ends).split())}.")
    return domain


def _coordinate(f, groups, axis):
    for key in (f"{groups[0]}/grid/{axis}",) if groups else (f"{axis}-coordinate", axis):
        if key in f:
            return f[key][0] if f[key].ndim == 2 else f[key][:]  # `t` may be (N, T)


def _ends(x):
    """The domain, from cell centres; rounded, since they are stored in single precision."""
    half = (x[-1] - x[0]) / max(len(x) - 1, 1) / 2
    return round(float(x[0] - half), 5), round(float(x[-1] + half), 5)


def _said(f, groups):
    """What attributes and `config` texts say, by lower-case name without nesting."""
    said = {}

    def add(values):
        for key, value in values.items():
            if key == "config":
                value = yaml.safe_load(value)
            if isinstance(value, dict):
                add(value)
            else:
                said[str(key).lower()] = value

    add(dict(f.attrs))
    if groups:
        add(dict(f[groups[0]].attrs))
    if said.get("boundary") not in ("periodic", "closed"):  # other writers mean other things
        said.pop("boundary", None)
        said.pop("domain", None)
    return said
