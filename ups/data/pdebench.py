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
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import yaml

from ups.config import UsageError
from ups.data.facts import Facts, understand
from ups.data.file import File, ends, even_times
from ups.data.stores import HDF5, Variable, opened


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


def stored(task, names):
    """{channel or input: (key, axes, component)} of a task in a file that holds `names`.

    Of an axis `row` the first is meant; keys without an axis `sample` are in each sample's group.
    """
    channels, space = task.facts.channels, task.facts.axes
    if task.layout == "steady":
        return {channels[0]: ("tensor", ("sample", "row", *space), 0),
                **{name: ("nu", ("sample", *space), 0) for name in task.facts.inputs}}
    if task.layout == "flat":
        return {name: (name if len(channels) > 1 else "tensor", ("sample", "time", *space), 0)
                for name in channels}
    key, axes = ("data", ()) if task.layout == "groups" else ("velocity", ("sample",))
    axes = (*axes, "time", *space, "channel")
    found = {name: (key, axes, k) for k, name in enumerate(channels)}
    return found | {name: (name, axes, 0) for name in ("particles",) if name in names}


def recognise(path):
    """The task that a file is beyond doubt; None for any other, whatever its keys."""
    if path.suffix not in HDF5 or not path.is_file():
        return None
    with opened(path) as f:
        name = _identify(f)
        ours = f'"task": "{name}"' in str(f.attrs.get("ups", ""))
    return name if name and (ours or path.name.startswith(TASKS[name].prefix)) else None


def identify(path):
    """The task whose layout a file has, by its keys, shapes and attributes; or None."""
    if path.suffix not in HDF5 or not path.is_file():
        return None
    with opened(path) as f:
        return _identify(f)


def _identify(f):
    def ndim(key):
        return f[key].ndim if isinstance(f.get(key), h5py.Dataset) else None

    attributes = {key.lower() for key in f.attrs}
    if ndim("tensor") == 3:
        for name, wanted in (("reacdiff1d", {"nu", "rho"}), ("burgers1d", {"nu"}),
                             ("advection1d", {"beta"})):
            if wanted <= attributes:
                return name
    if ndim("tensor") == 4 and ndim("nu") == 3:
        return "darcy2d"
    for name in ("cns1d", "cns2d", "cns3d"):
        facts = TASKS[name].facts
        if all(ndim(key) == 2 + len(facts.axes) for key in facts.channels):
            return name  # a file of fewer axes may still carry Vz
    if ndim("velocity") == 5 and "t" in f:
        return "ns2d"
    group = next((key for key in f if key.isdigit()), "")
    if ndim(f"{group}/data"):
        shape = f[f"{group}/data"].shape
        for name in ("diffsorp1d", "diffreact2d", "swe2d"):
            facts = TASKS[name].facts
            if len(shape) == 2 + len(facts.axes) and shape[-1] == len(facts.channels):
                return name
    return None


def open_pdebench(path, name=None):
    """Read the header of a file; `name` says which task it is where it could be another's."""
    path, warnings = Path(path), []
    with opened(path) as f:
        found = _identify(f)
        if found is None or name not in (None, found):
            raise UsageError(f"{path} has not the layout of {name or 'PDEBench'}, but "
                             f"{f'that of {found}' if found else ', '.join(list(f)[:6])}.")
        task = TASKS[found]
        known, layout = task.facts, stored(task, f)
        groups = tuple(sorted((key for key in f if key.isdigit()), key=int))
        groups = groups if task.layout == "groups" else ()
        first = f"{groups[0]}/" if groups else ""  # the others are like the first, or refused
        items = {key: f[first + key] for key, _, _ in layout.values()}
        sources = {channel: (Variable(key, items[key].shape, items[key].dtype.kind, axes,
                                      groups=groups), k)
                   for channel, (key, axes, k) in layout.items()}
        main, _ = sources[known.channels[0]]
        sizes = {"sample": len(groups)} | dict(zip(main.axes, main.shape, strict=True))
        said = _said(f, first)
        params = [_number(said.get(key.lower(), value), key, path)
                  for key, value in task.params.items()]
        times, dt, domain = np.arange(2.0), 1.0, []
        if not known.steady:
            times, dt = even_times(_points(f, first, "t", sizes["time"]), path)
        for axis in known.axes:
            x = _points(f, first, axis, sizes[axis])
            domain.append(task.domain if x is None else ends(x, axis, warnings))
    facts = {"channels": tuple(one for one in layout if one not in known.inputs),
             "grid": tuple(sizes[axis] for axis in known.axes), "frames": len(times), "dt": dt,
             "domain": tuple(domain)}
    if said.get("boundary") in ("periodic", "closed"):  # of ours: the published ones have walls
        facts |= {"boundary": (said["boundary"],) * len(domain),
                  **understand({"domain": said.get("domain", facts["domain"])}, path)[0]}
        if found == "ns2d" and said["boundary"] == "periodic":
            facts["shifts"] = ("x",)  # the force depends on y
    return File(path, Facts(**vars(known) | facts), sizes["sample"], times,
                np.tile(np.array(params, np.float64), (sizes["sample"], 1)),
                tuple(sources.values()), test=task.test, family=True, warnings=tuple(warnings))


def _number(value, key, path):
    try:
        if math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError):
        pass
    raise UsageError(f"{path}: the attribute {key} is {value!r}, no finite number; set it with "
                     f"h5py: f.attrs['{key}'] = value.")


def _points(f, first, axis, n):
    """The n coordinates of an axis, of which a file may hold one more; None where it has none."""
    key = f"{first}grid/{axis}" if first else f"{axis}-coordinate"
    key = key if key in f else axis
    if key not in f and axis != "t":
        return None
    x = f[key][()] if key in f else np.zeros(0)
    if x.shape[-1] not in (n, n + 1):
        raise UsageError(f"{f.filename}: {n} points of {axis} need as many coordinates, or one "
                         f"more, in {key}; it has {x.shape[-1]}.")
    return x[..., :n]


def _said(f, first):
    """What attributes and `config` texts say, by lower-case name without nesting."""
    said, values = {}, [dict(f.attrs), *([dict(f[first].attrs)] if first else [])]
    while values:
        for key, value in values.pop(0).items():
            value = yaml.safe_load(value) if key == "config" else value
            if isinstance(value, dict):
                values.append(value)
            else:
                said[str(key).lower()] = value
    return said
