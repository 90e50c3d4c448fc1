"""The eleven data sets of PDEBench: their facts, and their HDF5 layouts read lazily.

    flat     one data set per channel (N, T, *grid); `x-coordinate`, ..., `t-coordinate` (T or T+1);
             parameters are attributes                       advection burgers reacdiff cns1d/2d/3d
    steady   `nu` (N, n, n) is the coefficient a, `tensor` (N, 1, n, n) the solution u      darcy2d
    groups   one group per sample, `0000/data` (T, *grid, C), `0000/grid/{x,y,t}`, YAML text in the
             attribute `config`                                      diffsorp1d diffreact2d swe2d
    last     `velocity` (N, T, n, n, 2), perhaps `particles` (N, T, n, n, 1), `t` (N, T), `force`
             (N, n, n, 2), YAML text in `config`                                               ns2d

A file is one of them where its keys and its name are the published ones, or where our own solver
wrote it. Another file with such keys may be anything: whoever opens it must name the task.
A steady file has two frames of u, zero and the solution; its coefficient is an input.
"""

import math
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import yaml

from ups.config import UsageError
from ups.data.facts import Facts
from ups.data.file import File


class UnknownLayout(UsageError):
    """A sound HDF5 file that is none of the eleven."""


@dataclass(frozen=True)
class Published:
    """A task of PDEBench: its facts as far as they are known without a file."""

    facts: Facts
    layout: str     # flat, steady, groups or last
    file: str       # published name
    prefix: str     # with which every published name begins
    test: str       # first or last tenth of the samples
    params: dict    # names; the value holds where a file does not say, None: the file must say
    domain: tuple[float, float] = (0.0, 1.0)  # of every axis, where a file has no coordinates


def _task(name, equation, layout, axes, channels, params, boundary, file, test, **facts):
    domain = facts.pop("domain", (0.0, 1.0))
    axes = tuple(axes.split())
    ends = (boundary,) * len(axes)
    if boundary == "periodic":
        facts.setdefault("shifts", axes)
    facts = Facts(name, tuple(channels.split()), axes, (0,) * len(axes), ends,
                  (domain,) * len(axes), 0.0, 0, equation, params=tuple(params), **facts)
    prefix = re.match(r"[^{]*?(?=_Sols|_Rand|_Nu|_beta|_NA|_2d|\{)", file)[0]
    return name, Published(facts, layout, file, prefix, test, params, domain)


_CNS = "compressible Navier-Stokes, shear viscosity eta, bulk viscosity zeta"
_FLOW = {"eta": None, "zeta": None, "M": None}
TASKS = dict([
    _task("advection1d", "u_t + beta u_x = 0", "flat", "x", "u", {"beta": None}, "periodic",
          "1D_Advection_Sols_beta{beta}.hdf5", "first", conserved=("u",), mirrors=(("", ("u",)),),
          linear=True),
    _task("burgers1d", "u_t + (u^2/2)_x = (nu/pi) u_xx", "flat", "x", "u", {"nu": None},
          "periodic", "1D_Burgers_Sols_Nu{nu}.hdf5", "first", conserved=("u",),
          mirrors=(("x", ("u",)),)),
    _task("reacdiff1d", "u_t = nu u_xx + rho u (1 - u)", "flat", "x", "u",
          {"nu": None, "rho": None}, "periodic", "ReacDiff_Nu{nu}_Rho{rho}.hdf5", "first",
          positive=("u",), mirrors=(("x", ()),)),
    _task("diffsorp1d", "u_t = D/R(u) u_xx", "groups", "x", "u", {}, "closed",
          "1D_diff-sorp_NA_NA.h5", "last", positive=("u",)),
    _task("cns1d", _CNS, "flat", "x", "density pressure Vx", {"eta": None, "zeta": None}, "",
          "1D_CFD_Rand_Eta{eta}_Zeta{zeta}_periodic_Train.hdf5", "first",
          positive=("density", "pressure"), mirrors=(("x", ("Vx",)),)),
    _task("darcy2d", "div(a grad u) + beta = 0", "steady", "x y", "u", {"beta": None}, "closed",
          "2D_DarcyFlow_beta{beta}_Train.hdf5", "first", inputs=("a",), positive=("a", "u"),
          mirrors=(("x", ()), ("y", ())), steady=True),
    _task("diffreact2d", "u_t = Du lap u + u - u^3 - k - v, v_t = Dv lap v + u - v", "groups",
          "y x", "u v", {"Du": 1e-3, "Dv": 5e-3, "k": 5e-3}, "closed", "2D_diff-react_NA_NA.h5",
          "last", domain=(-1.0, 1.0), first_frame=10, mirrors=(("x", ()), ("y", ()))),
    _task("swe2d", "shallow water, radial dam break, outflow", "groups", "y x", "h", {}, "closed",
          "2D_rdb_NA_NA.h5", "last", domain=(-2.5, 2.5), positive=("h",)),
    _task("cns2d", _CNS, "flat", "x y", "density pressure Vx Vy", _FLOW, "periodic",
          "2D_CFD_Rand_M{M}_Eta{eta}_Zeta{zeta}_periodic_128_Train.hdf5", "first",
          conserved=("density",), positive=("density", "pressure"), vectors=(("Vx", "Vy"),),
          mirrors=(("x", ("Vx",)), ("y", ("Vy",)))),
    _task("ns2d", "incompressible Navier-Stokes with a body force, viscosity nu", "last", "y x",
          "Vx Vy", {"nu": 0.01}, "closed", "ns_incom_2d_Nu{nu}.h5", "last",
          vectors=(("Vy", "Vx"),), solenoidal=True),
    _task("cns3d", _CNS, "flat", "x y z", "density pressure Vx Vy Vz", _FLOW, "periodic",
          "3D_CFD_Rand_M{M}_Eta{eta}_Zeta{zeta}_periodic_Train.hdf5", "first",
          conserved=("density",), positive=("density", "pressure"),
          vectors=(("Vx", "Vy", "Vz"),),
          mirrors=(("x", ("Vx",)), ("y", ("Vy",)), ("z", ("Vz",)))),
])


@dataclass(frozen=True)
class PDEBenchFile(File):
    layout: str = "flat"
    groups: tuple[str, ...] = field(default=(), repr=False)

    def _block(self, f, channels, rows, frames, stride):
        """The fastest axis is read whole: a disk page holds it anyway."""
        part, every = slice(rows[0], rows[-1] + 1), (slice(None, None, stride),)
        space = every * (len(self.facts.grid) - 1)  # what HDF5 strides over; numpy does the last
        if channels == self.facts.inputs:
            return f["nu"][(part, *space)][:, None, None, ..., ::stride]
        if self.layout == "steady":
            u = f["tensor"][(part, 0, *space)][:, None, None, ..., ::stride]
            return np.concatenate([0 * u, u], 1)[:, frames.start:frames.stop:frames.step]
        time = slice(frames.start, frames.stop, frames.step)
        if self.layout == "flat":
            names = channels if len(channels) > 1 else ("tensor",)
            return np.stack([f[name][(part, time, *space)][..., ::stride] for name in names], 2)
        if self.layout == "groups":
            block = np.stack([f[self.groups[row]]["data"][(time, *space)] for row in rows])
        else:
            names = [name for name in ("velocity", "particles") if name in f]
            block = np.concatenate([f[name][(part, time, *space)] for name in names], -1)
        return np.moveaxis(block[..., ::stride, :], -1, 2)


def recognise(path):
    """The task that a file is beyond doubt; None for any other, whatever its keys."""
    with opened(path) as f:
        try:
            name = _identify(f, path)
        except UnknownLayout:
            return None
        ours = f'"task": "{name}"' in str(f.attrs.get("ups", ""))
    return name if ours or Path(path).name.startswith(TASKS[name].prefix) else None


def identify(path):
    """The task whose layout a file has, by its keys, shapes and attributes."""
    with opened(path) as f:
        return _identify(f, path)


def open_pdebench(path, name=None):
    """Read the header of a file; `name` says which task it is where it could be another's."""
    with opened(path) as f:
        found = _identify(f, path)
        if name not in (None, found):
            raise UsageError(f"{path} has the layout of {found}, not that of {name}.")
        task, groups = TASKS[found], ()
        known = task.facts
        if task.layout == "groups":
            groups = tuple(sorted((key for key in f if key.isdigit()), key=int))
            samples, (frames, *grid, _) = len(groups), f[groups[0]]["data"].shape
            if (kind := f[groups[0]]["data"].dtype).kind not in "fiu":
                raise UsageError(f"{path}: {groups[0]}/data holds no real numbers, but {kind}.")
        else:
            samples, frames, *grid = _shape(f, task, path)
        times = np.arange(2.0) if task.layout == "steady" else _coordinate(f, groups, "t")
        frames = 2 if task.layout == "steady" else frames
        if not (samples and frames) or times is None or len(times) not in (frames, frames + 1):
            raise UsageError(f"{path}: {samples} samples of {frames} frames need as many times, or "
                             "one more, in `t-coordinate`, `t` or `grid/t`.")
        said = _said(f, groups)
        params = [_number(said.get(key.lower(), value), key, path)
                  for key, value in task.params.items()]
        places = zip(grid, (_coordinate(f, groups, axis) for axis in known.axes), strict=True)
        ends = [task.domain if x is None else _ends(x[:n]) for n, x in places]
        times = np.asarray(times[:frames], dtype=np.float64)
        facts = {"channels": known.channels + (("particles",) if "particles" in f else ()),
                 "grid": tuple(grid), "frames": frames,
                 "dt": float(times[-1] - times[0]) / max(frames - 1, 1),
                 "domain": _domain(said.get("domain", ends), known, path)}
        if "boundary" in said:  # of ours: the published ones have walls
            facts["boundary"] = (said["boundary"],) * len(grid)
            if found == "ns2d" and said["boundary"] == "periodic":
                facts["shifts"] = ("x",)  # the force depends on y
    facts = Facts(**vars(known) | facts)
    values = np.tile(np.array(params, dtype=np.float64), (samples, 1))
    return PDEBenchFile(Path(path), facts, samples, times, values, test=task.test, family=True,
                        layout=task.layout, groups=groups)


def uneven(file):
    """What is wrong with the coordinates of space and time: {axis: phrase}."""
    found, t, steps = {}, file.times, np.diff(file.times)
    usual = np.median(steps) if len(steps) else 0.0
    rounded = 0.01 * usual + 1e-6 * abs(t).max()
    for k in np.flatnonzero(~((steps > 0) & (abs(steps - usual) < rounded)))[:1]:
        found["t"] = (f"does not increase evenly from frame {k} to {k + 1} ({t[k]:g} to "
                      f"{t[k + 1]:g}): interpolate the fields first")
    if not isinstance(file, PDEBenchFile):
        return found
    with opened(file.path) as f:
        for axis, n in zip(file.facts.axes, file.facts.grid, strict=True):
            x = _coordinate(f, file.groups, axis)
            if x is not None and len(x) not in (n, n + 1):
                found[axis] = f"has {len(x)} coordinates for {n} points"
            elif x is not None and not np.allclose(np.diff(x), np.diff(x).mean(), rtol=0.01):
                found[axis] = "is not evenly spaced: interpolate the fields first"
    return found


@contextmanager
def opened(path):
    """An open HDF5 file; what is wrong with it, or with its header, is one sentence."""
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
        facts = TASKS[name].facts
        if all(ndim.get(key) == 2 + len(facts.axes) for key in facts.channels):
            return name  # a file of fewer axes may still carry Vz
    if ndim.get("velocity") == 5 and "t" in ndim:
        return "ns2d"
    group = next((f[key] for key in f if key.isdigit()), None)
    if group is not None and "data" in group:
        shape = group["data"].shape
        for name in ("diffsorp1d", "diffreact2d", "swe2d"):
            facts = TASKS[name].facts
            if len(shape) == 2 + len(facts.axes) and shape[-1] == len(facts.channels):
                return name
    raise UnknownLayout(
        f"{path}: unknown layout; looked for `tensor` (N,T,x) with attribute beta or Nu, `tensor` "
        "with `nu`, `density` with `pressure` and `Vx`, `velocity` with `t`, groups `0000/data` "
        f"(T,x,1), (T,y,x,1) or (T,y,x,2); found {', '.join(list(f)[:6]) or 'nothing'}.")


def _shape(f, task, path):
    """(N, T, *grid) of a file that is not in groups: that of all its data sets."""
    channels, axes = task.facts.channels, len(task.facts.axes)
    names = {"steady": ("nu", "tensor"), "last": ("velocity", "particles")}.get(
        task.layout, channels if len(channels) > 1 else ("tensor",))
    sets = {key: f[key] for key in names if key in f}
    shapes = {(one.shape[:1] + (1,) * (key == "nu") + one.shape[1:])[:2 + axes]
              for key, one in sets.items()}
    last = {"velocity": 2, "particles": 1}
    if len(shapes) > 1 or any(one.dtype.kind not in "fiu" or one.shape[-1] != last.get(
            key, one.shape[-1]) for key, one in sets.items()):
        found = ", ".join(f"{key} {one.dtype} {one.shape}" for key, one in sets.items())
        raise UsageError(f"{path}: {found} do not hold numbers of one shape (velocity with two "
                         "components).")
    return shapes.pop()


def _number(value, key, path):
    try:
        if not math.isfinite(number := float(value)):
            raise ValueError
    except (TypeError, ValueError):
        what = (f"is missing; set it with h5py: f.attrs['{key}'] = value" if value is None
                else f"is {value!r}; it must be a finite number")
        raise UsageError(f"{path}: the attribute {key} {what}.") from None
    return number


def _domain(ends, facts, path):
    """Two increasing numbers for each space axis."""
    try:
        domain = tuple((float(low), float(high)) for low, high in ends)
    except (TypeError, ValueError):
        domain = ()
    if len(domain) != len(facts.axes) or not all(-math.inf < a < b < math.inf for a, b in domain):
        raise UsageError(f"{path}: coordinates, or the attribute `domain`, are not two increasing "
                         f"numbers for {', '.join(facts.axes)}: {' '.join(str(ends).split())}.")
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
