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
from ups.data.facts import beside, understand
from ups.data.file import File, agree, found, natural
from ups.data.stores import ROLES, SHORT, SUFFIXES, Unrecognised, contents, opened
from ups.data.well import SPLITS

AXES = {1: "x", 2: "time x", 3: "sample time x", 4: "sample time x y", 5: "sample time channel x y"}


def open_array(path, axes="", said=None):
    """Open a file. `axes` names the axes of its largest array in stored order.

    `said` are facts, which win over a YAML beside the file, which wins over the file's own.
    """
    path, said = Path(path), said or {}
    yaml = beside(path.with_suffix(".yaml"))
    with opened(path) as f:
        variables, stored = contents(f)
        stored = {key: value for key, value in stored.items() if key not in yaml | said}
        facts, params = understand(stored, path)
        for where, more in ((path.with_suffix(".yaml"), yaml), ("--facts", said)):
            more, numbers = understand(more, where, strict=True)
            if "params" in facts:  # names of those in the file
                facts["params"] = tuple(dict.fromkeys((*facts["params"], *numbers)))
            facts, params = facts | more, params | numbers
        words = axes.replace(",", " ").split() or facts.get("axes", ())
        words = tuple(SHORT.get(word.lower(), word) for word in words)
        if "n" in map(str.lower, words):
            raise UsageError(f"{path}: the axis n may be of samples or of points; call it sample, "
                             "or x.")
        if not axes and not {*words} & {"sample", "time", "channel"}:
            words = ()  # of space alone: that is a fact, and no layout
        renamed = {}  # stored names of axes
        if words:  # what is said wins
            if like := [one for one in variables if len(one.axes) == len(words)]:
                like = max(like, key=lambda one: math.prod(one.shape))
                renamed = dict(zip(like.axes, words, strict=True))
            variables = [replace(one, axes=()) for one in variables]
        main = _main(path, f, variables, words, facts)
        sizes = dict(zip(main.axes, main.shape, strict=True))
        sizes.pop("channel", None)
        fields, points, warnings = _sort(path, f, variables, main, sizes, params, facts,
                                         renamed)
        channels, inputs = _channels(path, fields, sizes, facts, warnings)
        if missing := [name for name in facts.get("params", ()) if name not in params]:
            raise UsageError(f"{path}: there is no parameter {missing[0]}; there are "
                             f"{', '.join(params) or 'none'}.")
        params = {name: params[name] for name in facts.get("params", params)}
        return found(path, sizes, channels, inputs, points, params, facts, warnings)


def _main(path, f, variables, words, facts):
    """The largest array that may be predicted; its axes are those of the data."""
    steady, wanted = facts.get("steady", False), facts.get("channels", ())
    arrays = [one for one in variables
              if one.kind in "fiub" and one.name not in facts.get("inputs", ())]
    if words:
        named = [replace(one, axes=words) for one in arrays if len(one.shape) == len(words)]
        cure = f"--axes {' '.join(words)!r} has {len(words)} words, but no array has as many"
    else:
        named = [one for one in arrays if len(one.axes) > 1]
        usual = AXES.get(max((len(one.shape) for one in arrays), default=0), AXES[5])
        if any("MATLAB_class" in getattr(f[one.name], "attrs", ()) for one in variables):
            usual = " ".join(reversed(usual.split()))  # as MATLAB stores them
        cure = f"the axes have no names; say for example --axes {usual!r}, in stored order"
    if complexes := [one for one in variables if one.kind == "c" and len(one.shape) > 1]:
        raise UsageError(f"{path}: {complexes[0]} is complex; store real and imaginary parts as "
                         "two channels.")
    if not named:
        groups = [f"{name}/" for name in f if not hasattr(f[name], "shape")]
        there = [*map(str, variables), *groups]
        there = ", ".join(there[:8]) + ", .." * (len(there) > 8) + (
            " (whose arrays must lie outside of it)" if groups else "")
        raise Unrecognised(f"{path}: {cure}; found {there or 'nothing'}.")
    main = max(named, key=lambda one: (steady or "time" in one.axes, one.name in wanted,
                                       math.prod(one.shape)))
    axes = {*main.axes}
    if len(axes) < len(main.axes) or axes <= {"sample", "time", "channel"} or not (
            steady or "time" in axes):
        raise Unrecognised(f"{path}: of the axes of {main} one must be of space, one `time` unless "
                           "the facts say steady, and none twice.")
    return main


def _sort(path, f, variables, main, sizes, params, facts, renamed):
    """Fields, and coordinates by their axis; adds what each sample has one of to `params`."""
    fields, points, warnings = [], {}, []
    grid = {axis: n for axis, n in sizes.items() if axis not in ("sample", "time")}
    named = {f"{name}{end}": axis for axis in (*sizes, "channel") for end in ("", "-coordinate")
             for name in (axis, *(word for word, role in ROLES.items() if role == axis))} | renamed
    for one in variables:
        why, axis = "", named.get(one.name)
        if axis in grid and one.shape == (*grid.values(),) and one.axes in ((), (*grid,)):
            mesh = np.moveaxis(f[one.name][...], [*grid].index(axis), 0).reshape(grid[axis], -1)
            if (mesh == mesh[:, :1]).all():  # a mesh grid
                points[axis] = mesh[:, 0]
                continue
        if len(one.shape) > 2 or {*one.axes} & {*grid} - {axis}:  # a field `t`
            axis = None
        size = math.prod(one.shape)
        if not one.axes and one.shape in ((1, size), (size, 1)) and one.shape != main.shape:
            one = replace(one, shape=(size,))  # a vector of MATLAB
        if not axis:  # coordinates go by their name
            one = replace(one, axes=one.axes or _guess(path, one, main, sizes, facts))
        if axis in sizes:
            points[axis] = np.reshape(f[one.name], one.shape)
        elif axis:  # names of the channels, which are facts
            continue
        elif one.kind not in "fiub":
            why = "it holds no real numbers"
        elif one.axes == ("sample",) or one.shape == (1,):
            params.setdefault(one.name, np.ravel(f[one.name]))
        elif one.axes and all(n == sizes.get(axis, n * (axis == "channel"))
                              for n, axis in zip(one.shape, one.axes, strict=True)):
            fields.append(one)
        elif len(one.shape) == 1 and not one.axes:  # nobody says that it is something else
            raise UsageError(f"{path}: {one} fits no axis of {main}; give a parameter one value "
                             "for each sample, or leave the array out of the file.")
        else:
            why = f"its axes are not those of {main}"
        if why:
            warnings.append(f"{one.name} {one.shape} is passed over: {why}.")
    return fields, points, warnings


def _guess(path, one, main, sizes, facts):
    """Axes of an array that nobody named, from its shape: rather all of space than part of it."""
    space = {*sizes} - {"sample", "time"}
    ways = [axes for axes in itertools.combinations(main.axes, len(one.shape))
            if all(sizes.get(axis, n) == n for axis, n in zip(axes, one.shape, strict=True))
            and ("channel" not in axes or space <= {*axes})]
    if any(space <= {*axes} for axes in ways):
        ways = [axes for axes in ways if space <= {*axes} or not space & {*axes}]
    ways = [axes for axes in ways if "channel" not in axes] or ways
    given = facts.get("inputs", ())
    if one.name in given:
        ways = [axes for axes in ways if axes != ("sample",)]
    elif given or one.name in facts.get("params", ()):  # so it is no input
        ways = [axes for axes in ways if axes == ("sample",)] or ways[:1]
    if len(ways) > 1:
        cure = "name it in params or in inputs" if ("sample",) in ways else (
            f"repeat it to the shape of {main.name}, and name it in inputs")
        raise UsageError(f"{path}: {one} may lie over {' or over '.join(map(' '.join, ways))}, "
                         f"which are as long; {cure}.")
    return ways[0] if ways else ()


def _channels(path, fields, sizes, facts, warnings):
    """{name: (variable, component)} of what is predicted, and of what is given."""
    wanted, given = facts.get("channels", ()), facts.get("inputs", ())
    said, channels, inputs = dict.fromkeys((*wanted, *given)), {}, {}
    whole, there = [one for one in fields if {*sizes} <= {*one.axes}], []
    for one in fields:
        count = one.shape[one.axes.index("channel")] if "channel" in one.axes else 1
        names = one.channels
        if wanted and not names and whole == [one] and (count > 1 or one.name not in said):
            names = tuple(name for name in said  # said of its components
                          if name not in {other.name for other in fields if other != one})
        if names and len(names) != count:
            raise UsageError(f"{path}: channels {' '.join(names)!r} are {len(names)} names for the "
                             f"{count} of {one}.")
        first = "u" if one.name == "u" else f"{one.name}_"
        names = names or ([f"{first}{k}" for k in range(count)] if count > 1 else [one.name])
        there += names
        for k, name in enumerate(names):
            if name in given or one not in whole and not given:
                inputs[name] = one, k
            elif one in whole and (not wanted or name in wanted):
                channels[name] = one, k
            else:
                warnings.append(f"{name} is passed over: it is not among what is named.")
        if one not in whole and not given:
            lacks = " and ".join(axis for axis in sizes if axis not in one.axes)
            warnings.append(f"{one.name} has no axis {lacks}, so it is an input.")
    missing = [name for name in said if name not in channels | inputs]
    if missing or not channels:
        raise UsageError(f"{path}: there is no channel {(*missing, 'to predict')[0]}; there are "
                         f"{' '.join(there)}.")
    return ({name: channels[name] for name in (*said, *channels) if name in channels},
            {name: inputs[name] for name in (*given, *inputs)})


def open_folder(path, axes="", said=None):
    """The files of a folder [File, ..]: those of its splits, or one of single trajectories."""
    said = {"name": path.name} | beside(path.with_name(f"{path.name}.yaml")) | (said or {})
    if splits := [folder for folder in SPLITS if (path / folder).is_dir()]:
        return [replace(file, split=SPLITS[folder]) for folder in splits
                for file in open_folder(path / folder, axes, said)]
    files = [open_array(one, axes, said) for one in sorted(path.iterdir(), key=natural)
             if one.suffix.lower() in SUFFIXES]
    if not files or any(one.samples > 1 for one in files):
        return files
    agree(files)
    frames = min(one.facts.frames for one in files)
    warnings = list(dict.fromkeys(sum((one.warnings for one in files), ())))
    if cut := sum(one.facts.frames > frames for one in files):
        warnings.append(f"{cut} of {len(files)} trajectories are cut to {frames} frames.")
    return [File(path, replace(files[0].facts, frames=frames), len(files), files[0].times[:frames],
                 np.concatenate([one.params for one in files]), warnings=tuple(warnings),
                 parts=tuple(files))]
