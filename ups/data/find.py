"""Which data a run means: from `--data`, `--tasks`, `--axes`, `--facts` to data sets.

A path is one data set, whatever its format; a folder is one where it holds trajectories, splits, or
files of PDEBench. `--tasks` chooses where there are several, and says what a file is that could be
two things: nothing is ever guessed.
"""

import functools
import itertools
import shlex
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.arrays import open_array, open_folder
from ups.data.facts import beside, check_facts, read_yaml, understand
from ups.data.fields import Fields
from ups.data.pdebench import TASKS, identify, open_pdebench
from ups.data.solvers import SOLVERS
from ups.data.stores import SUFFIXES, Unrecognised, is_zarr
from ups.data.well import open_well
from ups.files import read_json

DEFAULT = "burgers1d"  # what is trained on where nothing is said
tell = functools.cache(print)  # once: some scripts open their data twice


class NoData(UsageError):
    """There is no such data; the sentence says how to make or get them."""


def open_data(cfg, make=True):
    """The data sets that a configuration names, in order, as `Fields`."""
    strides = {"stride_x": getattr(cfg, "stride_x", 1), "stride_t": getattr(cfg, "stride_t", 1)}
    found = find(cfg.data, cfg.tasks, cfg.axes, read_facts(cfg.facts), make)
    return [fields_of(files, **strides) for files in found.values()]


def open_fields(task, root="data", stride_x=1, stride_t=1):
    """One data set by name in a folder or file."""
    files, = find((root,), (task,)).values()
    return fields_of(files, stride_x=stride_x, stride_t=stride_t)


def fields_of(files, **strides):
    """Files as `Fields`; says aloud what the readers decided, and where scores will scatter."""
    for sentence in dict.fromkeys(f"{file.path}: {one}" for file in files for one in file.warnings):
        tell(sentence, file=sys.stderr)
    fields = Fields(files, **strides)
    name = fields.facts.name
    if fields.in_time:
        tell(f"{name}: too few trajectories to split, so each is split in time: the first part "
             "trains, the last tests, with gaps between them.", file=sys.stderr)
    elif (few := len(fields.split("test"))) < 10:
        tell(f"{name}: only {few} test trajector{'y' if few == 1 else 'ies'}; expect scores to "
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
    wanted = dict(map(parse_task, tasks or ([] if paths else [DEFAULT])))
    if len(wanted) < len(tasks):
        raise UsageError(f"--tasks {' '.join(tasks)} names one twice; write burgers1d:nu=0.001,0.1 "
                         "for files of one data set.")
    make = make and [*map(str, paths)] in ([], ["data"])  # never where somebody's data are
    paths, sets = paths or [Path("data")], {}
    for path in paths:
        for name, files in _sets(path, wanted, bool(tasks), axes, said).items():
            if name in sets:
                raise UsageError(f"two data sets in --data are called {name}; leave one out, or "
                                 "say another name of one in a YAML beside it.")
            sets[name] = files
    for name, values in wanted.items():
        if name not in sets and make and name in SOLVERS:
            from ups.data.make import make as solve

            print(f"{paths[0]} has no {name}: the small preset of the bundled solver is made "
                  "there.", file=sys.stderr)
            solve(name, out=paths[0], **values)
            sets |= _sets(paths[0], [name], bool(tasks), axes, said)
    return {name: _chosen(sets.get(name, []), name, values, paths)
            for name, values in (wanted or dict.fromkeys(sets, {})).items()}


def parse_task(text):
    """`burgers1d:nu=0.001,0.01` -> ("burgers1d", {"nu": [0.001, 0.01]})."""
    name, *choices = text.split(":")
    try:
        pairs = [choice.split("=") for choice in choices]
        return name, {key: [*map(float, values.split(","))] for key, values in pairs}
    except ValueError:
        raise UsageError(f"{text}: write parameters as {name}:key=value,value.") from None


def _sets(path, names, said_so, axes, said):
    """{name: [File, ..]} of a path: data sets of `names`, all where it is empty.

    With `said_so` a name says what a file is that could be two things.
    """
    bundled = len(names) > 0 and {*names} <= {*TASKS} and not axes
    if not path.exists() and not bundled:
        folder = next(one for one in path.parents if one.is_dir())
        raise NoData(f"--data {path}: there is no such file or folder; {folder} holds "
                     f"{_listed([folder])}.")
    if files := [] if axes else open_well(path):
        return {files[0].facts.name: [_told(file, path, said) for file in files]}
    own = [one for one in _entries(path) if one.suffix.lower() in SUFFIXES] or [path]
    fits = defaultdict(list)
    for one in own if not axes else ():
        fits[identify(one)].append(one)
    sure = [name for name, certain in fits if certain]
    if sure or bundled:
        found = {name: fits[name, True] or fits[name, False] * said_so for name in names or sure}
        found = {name: [_told(open_pdebench(one, name), one, said) for one in ones]
                 for name, ones in found.items() if ones}
        if left := [one.name for (_, certain), ones in fits.items() for one in ones
                    if not certain and not names]:
            file = found[sure[0]][0]
            found[sure[0]][0] = replace(file, warnings=(
                *file.warnings, f"beside it {' '.join(left)} is left out; name it in --data."))
        return found
    if len(own) > 1 or path.is_dir() and own == [path] != _entries(path):
        files = open_folder(path, axes, said)
    else:
        try:
            files = [open_array(own[0], axes, said)]
        except Unrecognised:
            if could := [name for name, _ in fits if name]:
                raise UsageError(
                    f"{own[0]} could be {could[0]}, but is not named like its files: say --tasks "
                    f"{could[0]} if it is, or name its axes, as in --axes 'sample time x'."
                    ) from None
            raise
    if not files:
        raise NoData(f"--data {path} holds {_listed([path])}: no file {' '.join(SUFFIXES)} and no "
                     "folder train, valid, test with such.")
    return {files[0].facts.name: files}


def _told(file, path, said):
    """A file whose format says what it holds, with the other facts that `said` says, or a YAML
    beside `path`."""
    yaml, facts = path.with_name(f"{path.name if path.is_dir() else path.stem}.yaml"), {}
    for where, more in ((yaml, beside(yaml)), ("--facts", said or {})):
        more, numbers = understand(more, where, strict=True)
        if fixed := [key for key in (*more, *numbers) if key in numbers or key in (
                "name", "axes", "channels", "inputs", "params", "dt", "steady")]:
            raise UsageError(f"{where}: {fixed[0]} of {file.path} is what the published format "
                             "says; leave it out.")
        facts |= more
    facts = replace(file.facts, **facts)
    check_facts(facts, file.path)
    return replace(file, facts=facts)


def _chosen(files, name, wanted, paths):
    """Those of `files` with the parameters that are `wanted`: {key: values}."""
    where = " ".join(map(str, paths))
    cure = f"there are: {_listed(paths)}."
    if name in SOLVERS:
        flags = "".join(f"--{key} {' '.join(map('{:g}'.format, values))} "
                        for key, values in wanted.items())
        folder = paths[0].parent if paths[0].is_file() else paths[0]
        cure = f"make one: python -m ups.data make {name} {flags}--out {shlex.quote(str(folder))}"
    elif name in TASKS:
        cure = "download it from PDEBench, https://doi.org/10.18419/darus-2986."
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


def _entries(path):
    """What a folder holds; a file, and a folder of zarr, is by itself."""
    return sorted(path.iterdir()) if path.is_dir() and not is_zarr(path) else [path]


def _listed(paths):
    entries = [one for path in paths for one in _entries(path)][:8]
    return ", ".join(one.name + "/" * one.is_dir() for one in entries) or "nothing"
