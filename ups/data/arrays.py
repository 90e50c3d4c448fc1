"""Arrays with named axes, in whatever file they lie.

    own HDF5, netCDF-4     axes by dimension scales, labels, or an attribute `dims` of each variable
    zarr                   axes by `dimension_names` or `_ARRAY_DIMENSIONS`
    .npy, .npz, any HDF5   axes by `--axes "sample time channel x y"`, in stored order

`sample`, `time` and `channel` are axes of their own, every other one is an axis of space. Channels
are the variables that have all axes; a variable without `time` is an input, constant in time; one
over `sample` alone is a parameter, as is a numeric attribute that is no fact. Coordinates are named
as their axis (`t` for time). A folder of files of one trajectory each is one data set.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.facts import Facts, check_facts
from ups.data.file import File
from ups.data.said import understand
from ups.data.stores import (
    ROLES,
    SUFFIXES,
    Unrecognised,
    Variable,
    contents,
    facts_beside,
    is_zarr,
    opened,
)

SPLITS = {"train": "train", "valid": "val", "test": "test"}  # of a folder
AXES = {1: "x", 2: "time x", 3: "sample time x", 4: "sample time x y", 5: "sample time channel x y"}


@dataclass(frozen=True)
class Array(File):
    sources: tuple[tuple[Variable, int], ...] = dataclasses.field(default=(), repr=False)
    #         the variable and its component, of each channel and then of each input

    def _open(self):
        return opened(self.path)

    def _block(self, f, channels, rows, frames, stride):
        facts = self.facts
        names = (*facts.channels, *facts.inputs)
        wanted = [self.sources[names.index(name)] for name in channels]
        rows = slice(int(rows[0]), int(rows[-1]) + 1)
        span = slice(frames.start, frames.stop, frames.step)
        grid = (len(range(0, n, stride)) for n in facts.grid)
        out = np.empty((rows.stop - rows.start, len(frames), len(channels), *grid), np.float32)
        for variable in dict.fromkeys(variable for variable, _ in wanted):
            parts = [(c, k) for c, (one, k) in enumerate(wanted) if one == variable]
            low, high = min(k for _, k in parts), max(k for _, k in parts)
            block = variable.read(f, facts.axes, rows, span, slice(low, high + 1), stride)
            for c, k in parts:
                out[:, :, c] = block[:, :, k - low]
                if facts.steady and channels[c] in facts.channels and "time" not in variable.axes:
                    out[:, [i for i, frame in enumerate(frames) if frame == 0], c] = 0
        return out


@dataclass(frozen=True)
class Folder(File):
    """Files of one trajectory each."""

    parts: tuple[File, ...] = dataclasses.field(default=(), repr=False)

    def _open(self):
        return contextlib.nullcontext()

    def _block(self, f, channels, rows, frames, stride):
        return np.concatenate([self.parts[row].read([0], frames, stride, channels)
                               for row in rows])


def open_array(path, axes="", said=None):
    """Open a file, or a folder of single trajectories; of other folders, all files in a list.

    `axes` names the axes of the largest array in stored order. `said` are facts, which win over a
    YAML beside the file, which wins over the file's own.
    """
    path = Path(path)
    if path.is_dir() and not is_zarr(path):
        return _open_folder(path, axes, said or {})
    with opened(path) as f:
        variables, stored = contents(f)
        beside, yaml = facts_beside(path)
        stored = {key: value for key, value in stored.items() if key not in yaml | (said or {})}
        facts, params = understand(stored, path)
        for where, more in ((beside, yaml), ("--facts", said or {})):
            more, numbers = understand(more, where, strict=True)
            facts, params = facts | more, params | numbers
        words = axes.split() or facts.get("axes", ())
        words = tuple(ROLES.get(word.lower(), word) for word in words)
        if not axes and not {*words} & {"sample", "time", "channel"}:
            words = ()  # of space alone: that is a fact, and no layout
        return _Reader(path, f, variables, words, facts, params).file()


class _Reader:
    """What a file holds, sorted by what it is for."""

    def __init__(self, path, f, variables, words, facts, params):
        self.path, self.f, self.facts, self.params = path, f, facts, params
        self.warnings, self.coordinates = [], {}
        if words:  # what is said wins
            variables = [dataclasses.replace(one, axes=()) for one in variables]
        self.main = main = self._main(variables, words)
        self.sizes = dict(zip(main.axes, main.shape, strict=True))
        self.sizes.pop("channel", None)
        self.whole = {*self.sizes}
        self.space = tuple(axis for axis in self.sizes if axis not in ("sample", "time"))
        self.samples = self.sizes.get("sample", 1)
        if not self.space:
            raise Unrecognised(f"{path}: the axes of {main} have no space axis.")
        self.fields = [one for one in map(self._sort, variables) if one]
        if wrong := set(facts.get("params", ())) - set(self.params):
            raise UsageError(f"{path}: there is no parameter {min(wrong)}; there are "
                             f"{', '.join(self.params) or 'none'}.")

    def _main(self, variables, words):
        """The largest array that may be predicted; its axes are those of the data."""
        given, wanted = self.facts.get("inputs", ()), self.facts.get("channels", ())
        arrays = [one for one in variables if one.kind in "fiub" and one.name not in given]
        found = ", ".join(map(str, variables)) or "nothing"
        if words:
            if len(set(words)) < len(words):
                raise UsageError(f"{self.path}: axes {' '.join(words)!r} name one twice.")
            arrays = [dataclasses.replace(one, axes=words) for one in arrays
                      if len(one.shape) == len(words)]
            if not arrays:
                raise Unrecognised(f"{self.path}: --axes {' '.join(words)!r} has {len(words)} "
                                   f"words, but no array has {len(words)} axes; found {found}.")
        elif not (named := [one for one in arrays if len(one.axes) > 1]):
            rank = max((len(one.shape) for one in arrays), default=0)
            cure = f"say --axes {AXES.get(rank, 'sample time channel x y z')!r}, in stored order"
            if any("MATLAB_class" in getattr(self.f[one.name], "attrs", ()) for one in variables):
                cure = ("MATLAB stores them in reverse, so say for example --axes "
                        f"{' '.join(reversed(AXES.get(rank, 'x').split()))!r}")
            raise Unrecognised(f"{self.path}: the axes have no names; {cure}; found {found}.")
        else:
            arrays = named
        steady = self.facts.get("steady", False)
        fitting = [one for one in arrays if steady or "time" in one.axes]
        if not fitting:
            raise Unrecognised(f"{self.path}: no array has an axis `time`, and the facts do not "
                               f"say steady; found {', '.join(map(str, arrays))}.")
        return max(fitting, key=lambda one: (one.name in wanted, math.prod(one.shape)))

    def _sort(self, one):
        """Keep a coordinate or a parameter; return a field with its axes, None for others."""
        for axis in (*self.sizes, "channel"):
            short = "t" if axis == "time" else axis
            if one.name in (axis, short, f"{short}-coordinate") and len(one.shape) <= 2 and not (
                    {*one.axes} & {*self.space} - {axis}):  # else a channel, such as `t` over x y
                self.coordinates[axis] = one
                return None
        one = dataclasses.replace(one, axes=one.axes or self._guess(one))
        if one.kind not in "fiub":
            self._pass(one, "it holds no real numbers")
        elif not one.axes or any(n != {"channel": n, **self.sizes}.get(axis)
                                 for n, axis in zip(one.shape, one.axes, strict=True)):
            self._pass(one, "its axes are not those of " + str(self.main))
        elif one.axes == ("sample",):
            self.params.setdefault(one.name, self.f[one.name][:].astype(np.float64))
        else:
            return one

    def _guess(self, one):
        """Axes of an array that nobody named, from its shape: samples first, then all of space."""
        ways = [axes for axes in itertools.combinations(self.main.axes, len(one.shape))
                if all(self.sizes.get(axis, n) == n
                       for axis, n in zip(axes, one.shape, strict=True))
                and ("channel" not in axes or {*self.space} <= {*axes})]
        return max(ways, key=lambda axes: ("sample" in axes, {*self.space} <= {*axes}), default=())

    def _pass(self, one, why):
        self.warnings.append(f"{one.name} {one.shape} is passed over: {why}.")

    def file(self):
        facts, path = self.facts, self.path
        channels, inputs = self._channels()
        vary = any("time" in one.axes for one, _ in inputs.values())
        times, dt = self._times()
        domain = facts.get("domain") or tuple(map(self._ends, self.space))
        if len(domain) != len(self.space):
            raise UsageError(f"{path}: domain has {len(domain)} pairs of ends for the axes "
                             f"{' '.join(self.space)}; say both ends of each.")
        params = self._params()
        boundary = facts.pop("boundary", ()) or ("",) * len(self.space)
        about = {"name": path.stem, "boundary": boundary} | facts | {
            "channels": tuple(channels), "inputs": tuple(inputs), "inputs_vary": vary,
            "axes": self.space, "grid": tuple(self.sizes[axis] for axis in self.space),
            "domain": domain, "dt": dt, "frames": len(times), "params": tuple(params)}
        about = Facts(**about)
        check_facts(about, path)
        values = np.array([*params.values()], np.float64).reshape(len(params), self.samples).T
        return Array(path, about, self.samples, times, values, warnings=tuple(self.warnings),
                     sources=(*channels.values(), *inputs.values()))

    def _channels(self):
        """{name: (variable, component)} of what is predicted, and of what is given."""
        wanted, given = self.facts.get("channels", ()), self.facts.get("inputs", ())
        said = (*wanted, *(name for name in given if name not in wanted))
        whole = [one for one in self.fields if self.whole <= {*one.axes}]
        channels, inputs = {}, {}
        for one in self.fields:
            names, predicted = self._names(one, said, whole), self.whole <= {*one.axes}
            if given and not predicted and not {*names} & {*said}:
                self._pass(one, "it lacks axes, and the inputs are named without it")
                continue
            for k, name in enumerate(names):
                if name in given or not predicted:
                    inputs[name] = one, k
                elif not wanted or name in wanted:
                    channels[name] = one, k
                else:
                    self._pass(one, f"{name} is not among the channels {' '.join(wanted)}")
            if not predicted and not {*names} <= {*given}:
                lacks = " and ".join(sorted(self.whole - {*one.axes}))
                self.warnings.append(f"{one.name} has no axis {lacks}, so it is an input.")
        for name in said:
            if name not in channels | inputs:
                raise UsageError(f"{self.path}: there is no channel {name}; there are "
                                 f"{' '.join(channels | inputs) or 'none'}.")
        if not channels:
            raise UsageError(f"{self.path}: every variable is an input; none is left to predict.")
        first = [name for name in said if name in channels]
        return ({name: channels[name] for name in (*first, *channels)},
                {name: inputs[name] for name in (*given, *inputs)})

    def _names(self, one, said, whole):
        """The names of a variable's components."""
        count = one.shape[one.axes.index("channel")] if "channel" in one.axes else 1
        own = one.channels
        if not own and count > 1 and (names := self.coordinates.get("channel")):
            own = understand({"channels": self.f[names.name][:]}, self.path)[0]["channels"]
        others = {other.name for other in self.fields if other != one}
        if not own and one in whole and one.name not in said and len(whole) == 1:
            own = tuple(name for name in said if name not in others)
            if len(own) != count and not self.facts.get("channels"):
                own = ()  # inputs alone are said, by names that are given here
        if own and len(own) != count:
            raise UsageError(f"{self.path}: channels {' '.join(own)!r} are {len(own)} names for "
                             f"the {count} of {one}.")
        alone = re.sub(r"\d+$", "", one.name) if len(whole) == 1 and one in whole else one.name
        if not own and count > 1:
            return tuple(f"{alone}{'' if alone != one.name or alone == 'u' else '_'}{k}"
                         for k in range(count))
        return own or (one.name,)

    def _params(self):
        chosen = self.facts.get("params") or self.params
        out = {}
        for name in chosen:
            value = self.params[name]
            if value.ndim and len(value) != self.samples:
                raise UsageError(f"{self.path}: parameter {name} has {len(value)} values for "
                                 f"{self.samples} samples.")
            out[name] = np.broadcast_to(value, self.samples)
        return out

    def _times(self):
        """Times of the stored frames (T,), and the time between two."""
        said, count = self.facts.get("dt"), self.sizes.get("time", 2)
        one = self.coordinates.get("time")
        if one and one.kind in "fiu" and one.shape[-1:] in ((count,), (count + 1,)):
            t, dt = even_times(self.f[one.name][()][..., :count], self.path)
            if said and not math.isclose(said, dt, rel_tol=1e-2):
                raise UsageError(f"{self.path}: dt is said to be {said:g}, but its frames are "
                                 f"{dt:g} apart; say what is true.")
            return t, said or dt
        if one:
            self._pass(one, f"it does not hold the times of {count} frames")
        if not said and not self.facts.get("steady"):
            self.warnings.append("nothing says the time between frames; it is taken as 1 (say dt).")
        return np.arange(count) * (said or 1.0), said or 1.0

    def _ends(self, axis):
        one, count = self.coordinates.get(axis), self.sizes[axis]
        if one and one.shape == (count,) and one.kind in "fiu":
            return ends(self.f[one.name][:], axis, self.warnings)
        if one:
            self._pass(one, f"it does not hold the {count} points of {axis}")
        return 0.0, 1.0


def even_times(t, where):
    """Times of the frames (T,) and the time between two, of those of every sample ([N,] T)."""
    t = np.atleast_2d(t).astype(np.float64)
    steps = np.diff(t) if t.shape[1] > 1 else np.ones(1)
    dt = steps.mean().item()
    if not (steps > 0).all() or abs(steps - dt).max() > 1e-3 * dt + 4e-7 * abs(t).max():
        raise UsageError(f"{where}: the times of the frames are uneven, with steps from "
                         f"{steps.min():g} to {steps.max():g}; write even frames.")
    return t[0], dt


def ends(x, axis, warnings):
    """Both ends of an axis: half a cell beyond its first and last point."""
    fine, x = x.dtype.itemsize > 4, x.astype(np.float64)
    steps = np.diff(x) if len(x) > 1 else np.ones(1)
    h = steps.mean().item()
    if abs(steps - h).max() > 1e-2 * abs(h) + 4e-7 * abs(x).max():
        warnings.append(f"the points of {axis} are uneven; they are taken as even.")
    digits = (12 if fine else 6) - math.ceil(math.log10(abs(h) * len(x) or 1))
    return round(float(x[0] - h / 2), digits), round(float(x[-1] + h / 2), digits)


def _open_folder(path, axes, said):
    said = facts_beside(path)[1] | said
    splits = [folder for folder in SPLITS if (path / folder).is_dir()]
    names = sorted((one for one in path.iterdir() if one.suffix.lower() in SUFFIXES),
                   key=lambda one: [int(part) if part.isdigit() else part
                                    for part in re.split(r"(\d+)", one.name)])
    name = said.get("name", path.name)
    if splits:
        parts = [(folder, _open_folder(path / folder, axes, said)) for folder in splits]
        return [dataclasses.replace(one, split=SPLITS[folder], facts=dataclasses.replace(
                    one.facts, name=name))
                for folder, part in parts for one in (part if isinstance(part, list) else [part])]
    if not names:
        raise Unrecognised(f"{path}: no file {', '.join(SUFFIXES)} in it.")
    files = [open_array(one, axes, said) for one in names]
    files = [dataclasses.replace(one, facts=dataclasses.replace(one.facts, name=name))
             for one in files]
    if any(one.samples > 1 for one in files):
        return files
    frames = min(one.facts.frames for one in files)
    first, *others = (dataclasses.replace(one.facts, frames=frames) for one in files)
    for one, other in zip(files[1:], others, strict=True):
        for key, value in vars(other).items():
            if value != (usual := getattr(first, key)) and not (
                    key == "dt" and math.isclose(value, usual, rel_tol=1e-3)):
                raise UsageError(f"{files[0].path} and {one.path} differ in {key} ({usual} and "
                                 f"{value}) and cannot be one data set.")
    warnings = list(dict.fromkeys(sum((one.warnings for one in files), ())))
    if cut := sum(one.facts.frames > frames for one in files):
        warnings.append(f"{cut} of {len(files)} trajectories are cut to {frames} frames.")
    return Folder(path, first, len(files), files[0].times[:frames],
                  np.concatenate([one.params for one in files]), warnings=tuple(warnings),
                  parts=tuple(files))
