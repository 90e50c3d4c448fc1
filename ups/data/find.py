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

from ups.config import UsageError
from ups.data.arrays import open_array, open_folder
from ups.data.facts import read_yaml
from ups.data.fields import Fields
from ups.data.pdebench import TASKS, identify, open_pdebench, recognise
from ups.data.stores import SUFFIXES, Unrecognised, is_zarr
from ups.data.well import is_well, open_well
from ups.files import read_json

DEFAULT = "burgers1d"  # what is trained on where nothing is said
SEEN = 8  # entries of a folder that a sentence lists


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


def read_facts(path):
    """The mapping in a `--facts` file."""
    return read_yaml(path, f"--facts {path}") if path else {}


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
                             f"--run, such as {free_run(name)}, or `evaluate.py --run {cfg.run} "
                             "--data` to judge it on these data.")


def free_run(name):
    """A folder for a run that is not there yet."""
    count = 1
    while (run := Path("runs") / (name if count == 1 else f"{name}_{count}")).exists():
        count += 1
    return run


def find(paths, tasks=(), axes="", said=None, make=False):
    """{name: [File, ..]} of the data sets below `paths`, those of `tasks` where any are named."""
    paths = (paths,) if isinstance(paths, str | Path) else paths
    make = make and tuple(map(str, paths)) in ((), ("data",))  # never where somebody's data are
    exact = not tasks  # nobody has named it, so files must be its own beyond doubt
    tasks = tasks or (() if paths else (DEFAULT,))
    paths = [Path(path) for path in paths] or [Path("data")]
    found = {}
    for task in tasks:
        name, wanted = parse_task(task)
        if name in found:
            raise UsageError(f"--tasks names {name} twice; choose files of one data set as in "
                             "burgers1d:nu=0.001,0.01.")
        files = _named(paths, name, axes, said, exact)
        if not files and make and name in _solvers():
            from ups.data.make import make as solve

            print(f"{paths[0]} has no {name}: the small preset of the bundled solver is made "
                  "there.", file=sys.stderr)
            solve(name, out=paths[0], **wanted)
            files = _named(paths, name, axes, said, exact)
        found[name] = _chosen(files, name, wanted, paths)
    for path in [] if tasks else paths:
        for name, files in _sets(path, axes, said).items():
            if name in found:
                raise UsageError(f"two data sets in --data are called {name}; rename one file.")
            found[name] = files
    return found


def _named(paths, name, axes, said, exact):
    """Files of the data set of a name, in the first of `paths` that has it."""
    for path in paths:
        if name in TASKS and not path.exists():
            continue  # there is a better cure than a look at the names beside it
        if name in TASKS and not axes:
            there = _nearest(path, name, recognise)
            there = there or ([] if exact else _nearest(path, name, identify))
            if there and path.is_dir() and there[0].parent != path:
                print(f"{name} is taken from {there[0].parent}.", file=sys.stderr)
            if there:
                return [open_pdebench(one, name) for one in there]
        alone = not path.is_dir() or is_zarr(path) or is_well(path) or path.name == name
        for one in [path] if alone else [path / name, *(path / f"{name}{end}" for end in SUFFIXES)]:
            if (alone or one.exists()) and (files := _sets(one, axes, said).get(name)):
                return files
    return []


def _chosen(files, name, wanted, paths):
    """Those of `files` with the parameters that are `wanted`: {key: values}."""
    if not files:
        where = " ".join(map(str, paths))
        raise NoData(f"no data set {name} in {where}{_cure(name, wanted, paths)}")
    for key, values in wanted.items():
        if key not in files[0].facts.params:
            raise UsageError(f"{name} has no parameter {key}; it has "
                             f"{', '.join(files[0].facts.params) or 'none'}.")
        column = files[0].facts.params.index(key)
        there = sorted({float(file.params[0, column]) for file in files})
        if missing := [value for value in values if not _among(value, there)]:
            raise NoData(f"no {name} file with {key}={missing[0]:g} in {paths[0]}, only {there}"
                         f"{_cure(name, {key: missing}, paths)}")
        files = [file for file in files if _among(file.params[0, column], values)]
    return files


def _sets(path, axes, said):
    """{name: [File, ..]} of one path."""
    folder = path.is_dir() and not is_zarr(path)
    if not path.exists():
        near = difflib.get_close_matches(path.name, _entries(path.parent), n=1)
        raise NoData(f"--data {path}: there is no such file or folder"
                     + (f"; the nearest is {path.parent / near[0]}." if near else "."))
    if axes:
        files = open_folder(path, axes, said) if folder else [open_array(path, axes, said)]
    elif is_well(path):
        files = open_well(path)
    elif names := sorted({name for one in _below(path) if (name := recognise(one))}):
        if len(names) > 1:
            raise UsageError(f"--data {path} holds {', '.join(names)}; choose by --tasks.")
        files = [open_pdebench(one, names[0]) for one in _nearest(path, names[0], recognise)]
    elif folder:
        own = [one for one in path.iterdir() if one.suffix.lower() in SUFFIXES]
        files = [] if len(own) == 1 else open_folder(path, axes, said)
        if len(own) == 1:
            return _sets(own[0], axes, said)
    else:
        try:
            files = [open_array(path, axes, said)]
        except Unrecognised:
            if could := identify(path):
                raise UsageError(
                    f"{path} could be {could}, but is not named like its files: say --tasks "
                    f"{could} if it is, or name its axes, as in --axes 'sample time x'.") from None
            raise
    if not files:
        raise NoData(f"--data {path} holds nothing that can be read"
                     f"{''.join(f'; {one}: {_why(path / one)}' for one in _entries(path)[:SEEN])}.")
    return {files[0].facts.name: files}


def fields_of(name, files, **strides):
    """Files as `Fields`; says aloud what the readers decided, and where scores will scatter."""
    for sentence in dict.fromkeys(f"{file.path}: {one}" for file in files for one in file.warnings):
        print(sentence, file=sys.stderr)
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


def _nearest(path, name, is_it):
    """Files of a task: `path`, or those in the nearest folder at or below it with any.

    So data/ and data/more/ are two data sets, and a download may be given by its root.
    """
    found = [one for one in _below(path) if is_it(one) == name]
    depth = min((len(one.parts) for one in found), default=0)
    found = [one for one in found if len(one.parts) == depth]
    first, *more = sorted({one.parent for one in found}) or [None]
    if more:
        raise UsageError(f"{path}: {name} files are in {first} and in {more[0]}; choose one "
                         "folder by --data.")
    return found


def _below(path):
    """A file, or all files of a folder that could be PDEBench's."""
    return [path] if path.is_file() else [] if is_zarr(path) else sorted(path.rglob("*.h*5"))


def _entries(path):
    return sorted(one.name for one in path.iterdir()) if path.is_dir() else []


def _why(path):
    """Why an entry of a folder is no data."""
    return "a folder" if path.is_dir() else f"none of {' '.join(SUFFIXES)}"


def _cure(name, wanted, paths):
    """How to get what is missing."""
    if name in _solvers():
        flags = "".join(f" --{key} {' '.join(f'{v:g}' for v in values)}"
                        for key, values in wanted.items())
        return (f"; make one: python -m ups.data make {name}{flags} --out "
                f"{shlex.quote(str(paths[0]))}")
    if name in TASKS:
        return "; download it from PDEBench, https://doi.org/10.18419/darus-2986."
    seen = [one for path in paths for one in _entries(path)][:SEEN]
    near = difflib.get_close_matches(name, [*TASKS, *(Path(one).stem for one in seen)], n=1)
    return (f"; the nearest is {near[0]}" if near else "") + (
        f"; there are: {', '.join(seen)}." if seen else "; it holds no data.")


def _solvers():
    from ups.data.solvers import SOLVERS

    return SOLVERS


def _among(value, values):
    return any(math.isclose(value, other, rel_tol=1e-6) for other in values)
