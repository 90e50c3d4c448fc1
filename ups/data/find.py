"""Which data a run means: from `--data`, `--tasks`, `--axes`, `--facts` to data sets.

A path is one data set, whatever its format; a folder is one where it holds trajectories, splits, or
files of PDEBench. `--tasks` chooses where there are several, and says what a file is that could be
two things: nothing is ever guessed.
"""

import itertools
import shlex
import sys
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.arrays import open_array, open_folder
from ups.data.facts import read_yaml
from ups.data.fields import Fields
from ups.data.pdebench import TASKS, identify, open_pdebench
from ups.data.stores import SUFFIXES, Unrecognised, is_zarr
from ups.data.well import is_well, open_well
from ups.files import read_json

DEFAULT = "burgers1d"  # what is trained on where nothing is said
SEEN = 8  # entries of a folder that a sentence lists


class NoData(UsageError):
    """There is no such data; the sentence says how to make or get them."""


def open_data(cfg, make=True):
    """The data sets that a configuration names, in order, as `Fields`."""
    strides = {"stride_x": getattr(cfg, "stride_x", 1), "stride_t": getattr(cfg, "stride_t", 1)}
    found = find(cfg.data, cfg.tasks, cfg.axes, read_facts(cfg.facts), make)
    return [fields_of(name, files, **strides) for name, files in found.items()]


def open_fields(task, root="data", stride_x=1, stride_t=1):
    """One data set by name in a folder or file."""
    (name, files), = find((root,), (task,)).items()
    return fields_of(name, files, stride_x=stride_x, stride_t=stride_t)


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


def read_facts(path):
    """The mapping in a `--facts` file."""
    return read_yaml(path, f"--facts {path}") if path else {}


def names_of(cfg):
    """The names of the data sets, without opening more than must be: a run is called after them."""
    if cfg.tasks or not cfg.data:
        return [parse_task(task)[0] for task in cfg.tasks or [DEFAULT]]
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
    names = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(2)))
    return next(run for one in names if not (run := Path("runs") / one).exists())


def find(paths, tasks=(), axes="", said=None, make=False):
    """{name: [File, ..]} of the data sets in `paths`, those of `tasks` where any are named."""
    paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    make = make and [*map(str, paths)] in ([], ["data"])  # never where somebody's data are
    sets = [] if tasks else [_files(path, axes, said) for path in paths]
    found = [(files[0].facts.name, files) for files in sets]
    sure, paths = not tasks, paths or [Path("data")]
    for task in tasks or ([] if found else [DEFAULT]):
        name, wanted = parse_task(task)
        files = _named(paths, name, axes, said, sure)
        if not files and make and name in _solvers():
            from ups.data.make import make as solve

            print(f"{paths[0]} has no {name}: the small preset of the bundled solver is made "
                  "there.", file=sys.stderr)
            solve(name, out=paths[0], **wanted)
            files = _named(paths, name, axes, said, sure)
        found.append((name, _chosen(files, name, wanted, paths)))
    if len(found) > len(dict(found)):
        raise UsageError(f"two of the data sets {' '.join(name for name, _ in found)} have one "
                         "name; rename a file, or choose as in --tasks burgers1d:nu=0.001,0.01.")
    return dict(found)


def parse_task(text):
    """`burgers1d:nu=0.001,0.01` -> ("burgers1d", {"nu": [0.001, 0.01]})."""
    name, *choices = text.split(":")
    try:
        pairs = [choice.split("=") for choice in choices]
        return name, {key: [*map(float, values.split(","))] for key, values in pairs}
    except ValueError:
        raise UsageError(f"{text}: write parameters as {name}:key=value,value.") from None


def _named(paths, name, axes, said, sure):
    """Files of the data set of a name, in the first of `paths` that has it."""
    for path in paths:
        fits = {one: identify(one) for one in _entries(path) if name in TASKS and not axes}
        if there := [one for one in fits if fits[one] == (name, True)] or [
                one for one in fits if fits[one][0] == name and not sure]:
            return [open_pdebench(one, name) for one in there]
        whole = path.name == name or is_well(path) or _entries(path) == [path]
        for one in [path] if whole else _entries(path):
            if name in (one.name, one.stem) or whole and (path.exists() or name not in TASKS):
                files = _files(one, axes, said)
                if files[0].facts.name == name:
                    return files
    return []


def _chosen(files, name, wanted, paths):
    """Those of `files` with the parameters that are `wanted`: {key: values}."""
    where, cure = " ".join(map(str, paths)), _cure(name, wanted, paths)
    if not files:
        raise NoData(f"no data set {name} in {where}; {cure}")
    for key, values in wanted.items():
        there = [dict(zip(file.facts.params, file.params[0].tolist(), strict=True)).get(key, np.nan)
                 for file in files]
        same = np.isclose(np.array(values)[:, None], there, 1e-6, 0)
        if not same.any(1).all():
            raise NoData(f"no {name} file for each of {key}={values} in {where}, only "
                         f"{sorted({*there})}; {cure}")
        files = [file for file, one in zip(files, same.any(0), strict=True) if one]
    return files


def _cure(name, wanted, paths):
    """How to get what is missing."""
    if name in _solvers():
        flags = "".join(f"--{key} {' '.join(f'{value:g}' for value in values)} "
                        for key, values in wanted.items())
        return (f"make one: python -m ups.data make {name} {flags}--out "
                f"{shlex.quote(str(paths[0]))}")
    if name in TASKS:
        return "download it from PDEBench, https://doi.org/10.18419/darus-2986."
    return f"there are: {_listed([one for path in paths for one in _entries(path)])}."


def _files(path, axes, said):
    """The files [File, ..] of the data set that a path is."""
    if not path.exists():
        raise NoData(f"--data {path}: there is no such file or folder; {path.parent} holds "
                     f"{_listed(_entries(path.parent))}.")
    if not axes and is_well(path):
        return open_well(path)
    entries = _entries(path)
    own = [one for one in entries if one.suffix.lower() in SUFFIXES] or [path]
    tasks = {one: task for one in own if not axes for task, sure in [identify(one)] if sure}
    if len({*tasks.values()}) > 1:
        raise UsageError(f"--data {path} holds {', '.join(sorted({*tasks.values()}))}; choose by "
                         "--tasks.")
    if tasks:
        return [open_pdebench(one, task) for one, task in tasks.items()]
    if len(own) > 1 or own != entries and own == [path]:
        if files := open_folder(path, axes, said):
            return files
        raise NoData(f"--data {path} holds {_listed(entries)}: none of {' '.join(SUFFIXES)}, nor "
                     "of folders train, valid, test.")
    try:
        return [open_array(own[0], axes, said)]
    except Unrecognised:
        if axes or not (could := identify(own[0])[0]):
            raise
        raise UsageError(f"{own[0]} could be {could}, but is not named like its files: say --tasks "
                         f"{could} if it is, or name its axes, as in --axes 'sample time x'."
                         ) from None


def _entries(path):
    """What a folder holds; a file, and a folder of zarr, is by itself."""
    return sorted(path.iterdir()) if path.is_dir() and not is_zarr(path) else [path]


def _listed(paths):
    return ", ".join(path.name + "/" * path.is_dir() for path in paths[:SEEN]) or "nothing"


def _solvers():
    from ups.data.solvers import SOLVERS

    return SOLVERS
