"""Which data a run means: from `--data`, `--tasks`, `--axes`, `--facts` to data sets.

A path is one data set, whatever its format; a folder is one where it holds trajectories, a download
of The Well, or files of PDEBench. `--tasks` chooses where there are several, and says what a file
is that could be two things: nothing is ever guessed.
"""

import difflib
import math
import shlex
import sys
from pathlib import Path

import yaml

from ups.config import UsageError
from ups.data.arrays import Unrecognised, open_array
from ups.data.fields import Fields
from ups.data.pdebench import (
    TASKS,
    UnknownLayout,
    identify,
    open_pdebench,
    recognise,
    uneven,
)
from ups.data.well import is_well, open_well
from ups.files import read_json

DEFAULT = "burgers1d"  # what is trained on where nothing is said
HDF5 = (".h5", ".hdf5")
ENDINGS = (*HDF5, ".nc", ".nc4", ".mat", ".npy", ".npz", ".zarr")


class NoData(UsageError, FileNotFoundError):
    """There is no such data; the sentence says how to make or get them."""


def open_data(cfg, make=True):
    """The data sets that a configuration names, in order, as `Fields`."""
    strides = {"stride_x": getattr(cfg, "stride_x", 1), "stride_t": getattr(cfg, "stride_t", 1)}
    found = find(cfg.data, cfg.tasks, cfg.axes, read_facts(cfg.facts), make)
    return [fields_of(name, files, **strides) for name, files in found.items()]


def open_fields(task, root="data", stride_x=1, stride_t=1):
    """One data set by name in a folder or file."""
    (name, files), = find((root,), (task,), make=False).items()
    return fields_of(name, files, stride_x=stride_x, stride_t=stride_t)


def names_of(cfg):
    """The names of the data sets, without opening more than must be: a run is called after them."""
    if cfg.tasks or not cfg.data:
        return [parse_task(task)[0] for task in cfg.tasks] or [DEFAULT]
    return list(find(cfg.data, (), cfg.axes, read_facts(cfg.facts)))


def refuse_other_data(cfg):
    """Refuse data sets that are not those which the run of `cfg` has its codecs from."""
    for fields in open_data(cfg, make=False):
        name = fields.facts.name
        codec = read_json(Path(cfg.run) / "codec" / name / "model" / "config.json")
        if codec.get("data") != fields.digest:
            raise UsageError(f"{cfg.run} was not trained on {fields.files[0].path}; give another "
                             f"--run, such as runs/{name}_2, or `evaluate.py --run {cfg.run} "
                             "--data` to judge it on these data.")


def find(paths, tasks=(), axes="", said=None, make=False):
    """{name: [File, ..]} of the data sets below `paths`, those of `tasks` where any are named."""
    make = make and tuple(map(str, paths)) in ((), ("data",))  # never where somebody's data are
    chosen = tasks or (() if paths else (DEFAULT,))
    paths = [Path(path) for path in paths] or [Path("data")]
    found = {}
    for task in chosen:
        name, wanted = parse_task(task)
        if name in found:
            raise UsageError(f"--tasks names {name} twice; choose files of one data set as in "
                             "burgers1d:nu=0.001,0.01.")
        found[name] = _named(paths, name, wanted, axes, said or {}, make, exact=not tasks)
    for path in [] if chosen else paths:
        for name, files in _sets(path, axes, said or {}).items():
            if name in found:
                raise UsageError(f"two data sets in --data are called {name}; rename one file.")
            found[name] = files
    return found


def _named(paths, name, wanted, axes, said, make, exact=False):
    """Files of one data set that is named, in the first of `paths` that has it.

    `exact`: nobody has named it, so files must be its own beyond doubt.
    """
    files = []
    for path in paths:
        if path.is_file() or path.suffix == ".zarr":
            there = [path] if name in (path.stem, _layout(path)) else []
        elif name in TASKS:
            there = _published(path, name, recognise)
            there = there or ([] if exact else _published(path, name, _layout))
        else:
            there = [one for one in (path / name, *(path / f"{name}{end}" for end in ENDINGS))
                     if one.exists()][:1]
        for one in there:
            files += [open_pdebench(one, name)] if name in TASKS else [
                file for more in _sets(one, axes, said).values() for file in more]
        if files:
            break
    if not files and make and name in _solvers():
        from ups.data.make import make as solve

        print(f"{paths[0]} has no {name}: the small preset of the bundled solver is made there.",
              file=sys.stderr)
        solve(name, out=paths[0], **wanted)
        return _named(paths, name, wanted, axes, said, make=False)
    if not files:
        raise NoData(_missing(paths, name, wanted))
    for key, values in wanted.items():
        if key not in files[0].facts.params:
            raise UsageError(f"{name} has no parameter {key}; it has "
                             f"{', '.join(files[0].facts.params) or 'none'}.")
        column = files[0].facts.params.index(key)
        there = sorted({float(file.params[0, column]) for file in files})
        if missing := [value for value in values if not _among(value, there)]:
            raise NoData(f"{paths[0]}: no {name} file with {key}={missing[0]:g}, only {there}; "
                         f"{_cure(name, {key: missing}, paths[0])}")
        files = [file for file in files if _among(file.params[0, column], values)]
    if files[0].path not in paths and files[0].path.parent not in paths:
        print(f"{name} is taken from {files[0].path.parent}.", file=sys.stderr)
    return files


def _sets(path, axes, said):
    """{name: [File, ..]} of one path."""
    if not path.exists():
        there = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        raise NoData(f"--data {path}: there is no such file or folder"
                     + (f"; the nearest is {path.parent / near[0]}." if near else "."))
    if axes:
        return _as_one(open_array(path, axes, said))
    if is_well(path):
        files = open_well(path)
        return {files[0].facts.name: files}
    if path.is_file() and path.suffix in HDF5 and (name := recognise(path)):
        return {name: [open_pdebench(path, name)]}
    passed = []  # why a reader did not take the path
    if path.is_dir() and path.suffix != ".zarr":
        names = sorted({name for one in _files(path, HDF5) if (name := recognise(one))})
        if len(names) == 1:
            there = _published(path, names[0], recognise)
            return {names[0]: [open_pdebench(one, names[0]) for one in there]}
        own = sorted(one for one in path.iterdir() if one.suffix in ENDINGS)
        if len(names) > 1:
            raise UsageError(f"--data {path} holds {', '.join(names)}; choose by --tasks.")
        passed.append("no file of PDEBench, no folder of The Well")
        if len(own) == 1:
            return _sets(own[0], axes, said)
    try:
        return _as_one(open_array(path, "", said))
    except Unrecognised as error:
        passed.append(str(error))
    if could := _layout(path):
        raise UsageError(f"{path} could be {could}, but is not named like its files: say --tasks "
                         f"{could} if it is, or name its axes, as in --axes \"sample time x\".")
    raise NoData(f"--data {path}: no data that can be read: {' '.join(passed)}")


def _as_one(file):
    files = list(file) if isinstance(file, list | tuple) else [file]
    return {files[0].facts.name: files}


def fields_of(name, files, **strides):
    for file in files:
        for axis, what in uneven(file).items():
            raise UsageError(f"{file.path}: axis {axis} {what}.")
        for sentence in file.warnings:
            print(f"{file.path}: {sentence}", file=sys.stderr)
    fields = Fields(files, **strides)
    if fields.in_time:
        print(f"{name}: too few trajectories to split, so each is split in time: the first part "
              "trains, the last tests, with gaps between them.", file=sys.stderr)
    elif (few := len(fields.split("test"))) < 10:
        print(f"{name}: only {few} test trajector{'y' if few == 1 else 'ies'}; expect scores to "
              "scatter.", file=sys.stderr)
    return fields


def parse_task(text):
    """`burgers1d:nu=0.001,0.01` -> ("burgers1d", {"nu": [0.001, 0.01]})."""
    name, *choices = text.split(":")
    wanted = {}
    for choice in choices:
        key, _, values = choice.partition("=")
        try:
            wanted[key] = [float(value) for value in values.split(",")]
        except ValueError:
            raise UsageError(f"{text}: write parameters as {name}:key=value,value.") from None
    return name, wanted


def read_facts(path):
    """The mapping in a `--facts` file."""
    if not path:
        return {}
    try:
        said = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UsageError(f"--facts {path}: not a readable YAML file "
                         f"({' '.join(str(error).split())}).") from None
    if not isinstance(said, dict):
        raise UsageError(f"--facts {path}: expected lines such as `boundary: periodic closed`.")
    return said


def _published(root, name, kind):
    """Files that are of the `kind` of a task in the nearest folder at or below `root` with any.

    So data/ and data/more/ are two data sets, and a download may be given by its root.
    """
    depths = {}
    for path in _files(root, HDF5):
        depths.setdefault(len(path.parts), []).append(path)
    for _, level in sorted(depths.items()):
        if paths := [path for path in level if kind(path) == name]:
            first, *more = sorted({path.parent for path in paths})
            if more:
                raise UsageError(f"{root}: {name} files are in {first} and in {more[0]}; choose "
                                 "one folder by --data.")
            return paths
    return []


def _files(root, endings):
    return sorted(path for path in Path(root).rglob("*") if path.suffix in endings)


def _layout(path):
    """The task of PDEBench whose keys and shapes a file has, whatever its name; or None."""
    try:
        return identify(path) if path.suffix in HDF5 and path.is_file() else None
    except UnknownLayout:
        return None


def _missing(paths, name, wanted):
    seen = sorted({one.name for path in paths if path.is_dir() for one in path.iterdir()
                   if one.suffix in ENDINGS or one.is_dir()})
    where = " ".join(map(str, paths))
    known = [*TASKS, *(Path(one).stem for one in seen)]
    if name not in TASKS and not any(path.is_file() for path in paths):
        near = difflib.get_close_matches(name, known, n=1)
        return (f"no data set {name} in {where}; " + (f"the nearest is {near[0]}. " if near else "")
                + (f"There are: {', '.join(seen[:8])}." if seen else "It holds no data."))
    return f"no {name} file in {where}; {_cure(name, wanted, paths[0])}"


def _cure(name, wanted, root):
    if name not in TASKS:
        return "its file name, or its attribute `name`, is what --tasks takes."
    if name not in _solvers():
        return "download it from PDEBench, https://doi.org/10.18419/darus-2986."
    flags = "".join(f" --{key} {' '.join(f'{v:g}' for v in values)}"
                    for key, values in wanted.items())
    return f"make one: python -m ups.data make {name}{flags} --out {shlex.quote(str(root))}"


def _solvers():
    from ups.data.solvers import SOLVERS

    return SOLVERS


def _among(value, values):
    return any(math.isclose(value, other, rel_tol=1e-6) for other in values)
