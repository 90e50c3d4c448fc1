"""Arrays with named axes, in whatever file they lie.

    own HDF5, netCDF-4     axes by dimension scales, labels, or an attribute `dims` of each variable
    zarr                   axes by `dimension_names` or `_ARRAY_DIMENSIONS`
    .npy, .npz, any HDF5   axes by `--axes "sample time channel x y"`, in stored order

`sample`, `time` and `channel` are axes of their own, every other one is an axis of space. Channels
are the variables that have all axes; a variable without `time` is an input, constant in time; one
over `sample` alone is a parameter, as is a numeric attribute that is no fact. Coordinates are named
as their axis (`t` for time). A folder of files of one trajectory each is one data set.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.facts import Facts, check_facts, read_yaml, understand
from ups.data.file import File, ends, even_times, natural
from ups.data.stores import ROLES, SUFFIXES, Unrecognised, contents, opened
from ups.data.well import SPLITS

AXES = {1: "x", 2: "time x", 3: "sample time x", 4: "sample time x y", 5: "sample time channel x y"}


def open_array(path, axes="", said=None):
    """Open a file. `axes` names the axes of its largest array in stored order.

    `said` are facts, which win over a YAML beside the file, which wins over the file's own.
    """
    path, said = Path(path), said or {}
    beside = path.with_suffix(".yaml")
    yaml = read_yaml(beside, beside) if beside.is_file() else {}
    with opened(path) as f:
        variables, stored = contents(f)
        stored = {key: value for key, value in stored.items() if key not in yaml | said}
        facts, params = understand(stored, path)
        for where, more in ((beside, yaml), ("--facts", said)):
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
            variables = [replace(one, axes=()) for one in variables]
        self.main = self._main(variables, words)
        self.sizes = dict(zip(self.main.axes, self.main.shape, strict=True))
        self.sizes.pop("channel", None)
        self.space = tuple(axis for axis in self.sizes if axis not in ("sample", "time"))
        self.samples = self.sizes.get("sample", 1)
        if not self.space:
            raise Unrecognised(f"{path}: the axes of {self.main} have no space axis.")
        self.fields = [one for one in map(self._sort, variables) if one]

    def _main(self, variables, words):
        """The largest array that may be predicted; its axes are those of the data."""
        given, wanted = self.facts.get("inputs", ()), self.facts.get("channels", ())
        arrays = [one for one in variables if one.kind in "fiub" and one.name not in given]
        found = f"found {', '.join(map(str, variables)) or 'nothing'}."
        if len({*words}) < len(words):
            raise UsageError(f"{self.path}: axes {' '.join(words)!r} name one twice.")
        if words:
            named = [replace(one, axes=words) for one in arrays if len(one.shape) == len(words)]
            cure = f"--axes {' '.join(words)!r} has {len(words)} words, but no array has as many"
        else:
            named = [one for one in arrays if len(one.axes) > 1]
            usual = AXES.get(max((len(one.shape) for one in arrays), default=0), AXES[5])
            if any("MATLAB_class" in getattr(self.f[one.name], "attrs", ()) for one in variables):
                usual = " ".join(reversed(usual.split()))  # as MATLAB stores them
            cure = f"the axes have no names; say for example --axes {usual!r}, in stored order"
        if not named:
            raise Unrecognised(f"{self.path}: {cure}; {found}")
        fitting = [one for one in named if self.facts.get("steady") or "time" in one.axes]
        if not fitting:
            raise Unrecognised(f"{self.path}: no array has an axis `time`, and the facts do not "
                               f"say steady; {found}")
        return max(fitting, key=lambda one: (one.name in wanted, math.prod(one.shape)))

    def _sort(self, one):
        """Keep a coordinate or a parameter; return a field with its axes, None for others."""
        for axis in (*self.sizes, "channel"):
            short = "t" if axis == "time" else axis
            if one.name in (axis, short, f"{short}-coordinate") and len(one.shape) <= 2 and not (
                    {*one.axes} & {*self.space} - {axis}):  # else a channel, such as `t` over x y
                self.coordinates[axis] = one
                return None
        one = replace(one, axes=one.axes or self._guess(one))
        if one.kind not in "fiub":
            self._pass(one, "it holds no real numbers")
        elif not one.axes or any(n != {"channel": n, **self.sizes}.get(axis)
                                 for n, axis in zip(one.shape, one.axes, strict=True)):
            self._pass(one, f"its axes are not those of {self.main}")
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
        times, dt = self._times()
        domain = facts.get("domain") or tuple(map(self._ends, self.space))
        if len(domain) != len(self.space):
            raise UsageError(f"{path}: domain has {len(domain)} pairs of ends for the axes "
                             f"{' '.join(self.space)}; say both ends of each.")
        params = self._params()
        about = Facts(**{"name": path.stem, "boundary": ("",) * len(self.space)} | facts | {
            "channels": tuple(channels), "inputs": tuple(inputs), "axes": self.space,
            "inputs_vary": any("time" in one.axes for one, _ in inputs.values()),
            "grid": tuple(self.sizes[axis] for axis in self.space), "domain": domain, "dt": dt,
            "frames": len(times), "params": tuple(params)})
        check_facts(about, path)
        values = np.array([*params.values()], np.float64).reshape(len(params), self.samples).T
        return File(path, about, self.samples, times, values,
                    (*channels.values(), *inputs.values()), warnings=tuple(self.warnings))

    def _channels(self):
        """{name: (variable, component)} of what is predicted, and of what is given."""
        wanted, given = self.facts.get("channels", ()), self.facts.get("inputs", ())
        said, channels, inputs = dict.fromkeys((*wanted, *given)), {}, {}
        for one in self.fields:
            names, whole = self._names(one, said), {*self.sizes} <= {*one.axes}
            if not whole and given and not {*names} & {*said}:
                self._pass(one, "it lacks axes, and the inputs are named without it")
                continue
            for k, name in enumerate(names):
                if name in given or not whole:
                    inputs[name] = one, k
                elif not wanted or name in wanted:
                    channels[name] = one, k
                else:
                    self._pass(one, f"{name} is not among the channels {' '.join(wanted)}")
            if not whole and not {*names} <= {*given}:
                lacks = " and ".join(axis for axis in self.sizes if axis not in one.axes)
                self.warnings.append(f"{one.name} has no axis {lacks}, so it is an input.")
        if missing := [name for name in said if name not in channels | inputs]:
            raise UsageError(f"{self.path}: there is no channel {missing[0]}; there are "
                             f"{' '.join(channels | inputs) or 'none'}.")
        if not channels:
            raise UsageError(f"{self.path}: every variable is an input; none is left to predict.")
        return ({name: channels[name] for name in (*said, *channels) if name in channels},
                {name: inputs[name] for name in (*given, *inputs)})

    def _names(self, one, said):
        """The names of a variable's components: its own, those said of an only array, or counted.
        """
        count = one.shape[one.axes.index("channel")] if "channel" in one.axes else 1
        own, names = one.channels, self.coordinates.get("channel")
        if not own and names and count > 1:
            own = understand({"channels": self.f[names.name][:]}, self.path)[0]["channels"]
        others = {other.name for other in self.fields if other != one}
        alone = not any({*self.sizes} <= {*other.axes} for other in self.fields if other != one)
        if not own and alone and {*self.sizes} <= {*one.axes} and one.name not in said:
            own = tuple(name for name in said if name not in others)
            if len(own) != count and not self.facts.get("channels"):
                own = ()  # inputs alone are said, by names that are given here
        if own and len(own) != count:
            raise UsageError(f"{self.path}: channels {' '.join(own)!r} are {len(own)} names for "
                             f"the {count} of {one}.")
        counted = tuple(f"{one.name}{'' if one.name == 'u' else '_'}{k}" for k in range(count))
        return own or (counted if count > 1 else (one.name,))

    def _params(self):
        """{name: (N,)}"""
        out = {}
        for name in self.facts.get("params") or self.params:
            if name not in self.params:
                raise UsageError(f"{self.path}: there is no parameter {name}; there are "
                                 f"{', '.join(self.params) or 'none'}.")
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


def open_folder(path, axes="", said=None):
    """The files of a folder [File, ..]: those of its splits, or one of single trajectories."""
    beside = path.with_name(f"{path.name}.yaml")
    said = {"name": path.name} | (read_yaml(beside, beside) if beside.is_file() else {}) | (
        said or {})
    if splits := [folder for folder in SPLITS if (path / folder).is_dir()]:
        return [replace(file, split=SPLITS[folder]) for folder in splits
                for file in open_folder(path / folder, axes, said)]
    files = [open_array(one, axes, said) for one in sorted(path.iterdir(), key=natural)
             if one.suffix.lower() in SUFFIXES]
    if not files or any(one.samples > 1 for one in files):
        return files
    frames = min(one.facts.frames for one in files)
    first, *others = (replace(one.facts, frames=frames) for one in files)
    for one, other in zip(files[1:], others, strict=True):
        for key, value in vars(other).items():
            if value != (usual := getattr(first, key)) and not (
                    key == "dt" and math.isclose(value, usual, rel_tol=1e-3)):
                raise UsageError(f"{files[0].path} and {one.path} differ in {key} ({usual} and "
                                 f"{value}) and cannot be one data set.")
    warnings = list(dict.fromkeys(sum((one.warnings for one in files), ())))
    if cut := sum(one.facts.frames > frames for one in files):
        warnings.append(f"{cut} of {len(files)} trajectories are cut to {frames} frames.")
    return [File(path, first, len(files), files[0].times[:frames],
                 np.concatenate([one.params for one in files]), warnings=tuple(warnings),
                 parts=tuple(files))]
