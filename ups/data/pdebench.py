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

import json
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import yaml

from ups.data.arrays import open_array
from ups.data.facts import Facts
from ups.data.file import found
from ups.data.stores import HDF5, Variable, opened


@dataclass(frozen=True)
class Published:
    """A task of PDEBench: its facts as far as they are known without a file."""

    facts: Facts
    layout: str     # flat, steady, groups or last
    file: str       # how published names begin
    params: dict    # names; the value holds where a file does not say, None: the file must say


def _task(name, equation, layout, axes, channels, params, boundary, file, domain=(0.0, 1.0),
          **facts):
    axes = tuple(axes.split())
    if boundary == "periodic":
        facts.setdefault("shifts", axes)
    facts = Facts(name, tuple(channels.split()), axes, (0,) * len(axes), (boundary,) * len(axes),
                  (domain,) * len(axes), 0.0, 0, equation, params=tuple(params), **facts)
    return name, Published(facts, layout, file, params)


_CNS = "compressible Navier-Stokes, shear viscosity eta, bulk viscosity zeta"
_FLOW = {"eta": None, "zeta": None, "M": None}
TASKS = dict([
    _task("advection1d", "u_t + beta u_x = 0", "flat", "x", "u", {"beta": None}, "periodic",
          "1D_Advection", conserved=("u",), mirrors=(("", ("u",)),), linear=True),
    _task("burgers1d", "u_t + (u^2/2)_x = (nu/pi) u_xx", "flat", "x", "u", {"nu": None},
          "periodic", "1D_Burgers", conserved=("u",), mirrors=(("x", ("u",)),)),
    _task("reacdiff1d", "u_t = nu u_xx + rho u (1 - u)", "flat", "x", "u",
          {"nu": None, "rho": None}, "periodic", "ReacDiff_Nu", positive=("u",),
          mirrors=(("x", ()),)),
    _task("diffsorp1d", "u_t = D/R(u) u_xx", "groups", "x", "u", {}, "closed", "1D_diff-sorp",
          positive=("u",)),
    _task("cns1d", _CNS, "flat", "x", "density pressure Vx", {"eta": None, "zeta": None}, "",
          "1D_CFD", positive=("density", "pressure"), mirrors=(("x", ("Vx",)),)),
    _task("darcy2d", "div(a grad u) + beta = 0", "steady", "x y", "u", {"beta": None}, "closed",
          "2D_DarcyFlow", inputs=("a",), positive=("a", "u"), mirrors=(("x", ()), ("y", ())),
          steady=True),
    _task("diffreact2d", "u_t = Du lap u + u - u^3 - k - v, v_t = Dv lap v + u - v", "groups",
          "y x", "u v", {"Du": 1e-3, "Dv": 5e-3, "k": 5e-3}, "closed", "2D_diff-react",
          (-1.0, 1.0), first_frame=10, mirrors=(("x", ()), ("y", ()))),
    _task("swe2d", "shallow water, radial dam break, outflow", "groups", "y x", "h", {}, "closed",
          "2D_rdb", (-2.5, 2.5), positive=("h",)),
    _task("cns2d", _CNS, "flat", "x y", "density pressure Vx Vy", _FLOW, "periodic", "2D_CFD",
          conserved=("density",), positive=("density", "pressure"),
          mirrors=(("x", ("Vx",)), ("y", ("Vy",)))),
    _task("ns2d", "incompressible Navier-Stokes with a body force, viscosity nu", "last", "y x",
          "Vx Vy", {"nu": 0.01}, "closed", "ns_incom"),
    _task("cns3d", _CNS, "flat", "x y z", "density pressure Vx Vy Vz", _FLOW, "periodic", "3D_CFD",
          conserved=("density",), positive=("density", "pressure"),
          mirrors=(("x", ("Vx",)), ("y", ("Vy",)), ("z", ("Vz",)))),
])
NS2D = {"boundary": ("periodic",) * 2, "domain": ((0.0, 2 * np.pi),) * 2,
        "shifts": ("x",)}  # of our own solver, whose force depends on y; the published has walls


def stored(task, f=()):
    """{channel or input: (key, axes, component)} of a task in a file.

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
    return {name: (key, axes, k) for k, name in enumerate(channels)} | {
        name: (name, axes, 0) for name in ("particles",) if name in f}


def identify(path):
    """The task whose keys, shapes and attributes a file has, and whether that is beyond doubt."""
    if path.suffix not in HDF5 or not path.is_file():
        return None, False
    with opened(path) as f:
        if (ours := json.loads(f.attrs.get("ups", "{}")).get("task")) in TASKS:
            return ours, True
        fits = [name for name, task in TASKS.items() if _fits(f, task)]
    name = max(fits, key=lambda name: len(TASKS[name].params), default=None)
    return name, name is not None and path.name.startswith(TASKS[name].file)


def _fits(f, task):
    groups, keys = _groups(f, task), stored(task)
    for key, axes, _ in keys.values():
        item = f.get(f"{groups[0]}/{key}" if groups else key)
        if not isinstance(item, h5py.Dataset) or item.ndim != len(axes) or (
                groups and item.shape[-1] != len(keys)):
            return False
    said = {key.lower() for key, value in task.params.items() if value is None}
    return "tensor" not in f or said <= {key.lower() for key in f.attrs}


def _groups(f, task):
    """Those of the samples."""
    return tuple(sorted(filter(str.isdigit, f), key=int)) if task.layout == "groups" else ()


def open_pdebench(path, name):
    """Read the header of a file that `identify` takes for the task `name`."""
    path, points, task = Path(path), {}, TASKS[name]
    more = {"family": True, "test": "first" if task.layout in ("flat", "steady") else "last"}
    with opened(path) as f:
        if not _fits(f, task):  # our own solver's, in our own layout
            return replace(open_array(path), **more)
        groups, facts = _groups(f, task), dict(vars(task.facts))
        first = f"{groups[0]}/" if groups else ""  # the others are like the first, or refused
        sources = {channel: (Variable(key, f[first + key].shape, f[first + key].dtype.kind, axes,
                                      groups=groups), k)
                   for channel, (key, axes, k) in stored(task, f).items()}
        inputs = {channel: sources.pop(channel) for channel in task.facts.inputs}
        main, _ = sources[task.facts.channels[0]]
        sizes = {"sample": len(groups)} | {axis: n for axis, n in zip(
            main.axes, main.shape, strict=True) if axis not in ("row", "channel")}
        for axis in [*sizes][1:]:
            short = "t" if axis == "time" else axis
            for key in (f"{first}grid/{short}", f"{short}-coordinate", short):
                if key in f:
                    points[axis] = f[key][()]
        if {*task.facts.axes} <= {*points}:
            del facts["domain"]
        facts |= NS2D if name == "ns2d" and "ups" in f.attrs else {}
        said = _said(f, first)
        params = {key: said.get(key.lower(), value) for key, value in task.params.items()}
        return found(path, sizes, sources, inputs, points, params, facts, **more)


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
