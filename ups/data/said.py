"""Facts as files and people say them: attributes of HDF5, a YAML, the arguments of a writer.

A list is words separated by blanks (`boundary = "periodic closed"`), groups are separated by `;`
(`vectors = "vx vy; bx by"`), and a mirror names the channels that change sign behind its axis
(`mirrors = "x: u; y: v"`). YAML may use its own lists and mappings.
"""

import difflib
from pathlib import Path

import h5py
import numpy as np
import yaml

from ups.config import UsageError

MEASURED = {"grid", "frames", "inputs_vary", "scales"}  # never said, but seen in the data


def understand(values, where, strict=False):
    """Split {key: value} into facts and numeric parameters.

    Anything else is passed over in a file, where it may mean anything, and refused with `strict`.
    """
    facts, params = {}, {}
    for key, value in values.items():
        value = _plain(value)
        if value is None or key in MEASURED or key.startswith("_"):
            continue
        if key in READ:
            read, example = READ[key]
            try:
                facts[key] = read(value)
            except (TypeError, ValueError, KeyError):
                raise UsageError(f"{where}: {key} = {value!r} is not understood; write for "
                                 f"example {key} = {example!r}.") from None
        elif _numeric(value) and (strict or not isinstance(value, list)):
            params[key] = np.asarray(value, np.float64)
        elif strict:
            near = difflib.get_close_matches(key, READ, n=1, cutoff=0.0)[0]
            raise UsageError(f"{where}: {key} = {value!r} is neither a fact nor a number; the "
                             f"nearest fact is {near}.")
    return facts, params


def attributes(facts):
    """The inverse, for a file: {key: text, number or array} of facts that are said."""
    say = {"boundary": lambda value: " ".join(value) if all(value) else None,
           "vectors": lambda value: "; ".join(map(" ".join, value)),
           "mirrors": lambda value: "; ".join(f"{axis}: {' '.join(odd)}" for axis, odd in value),
           "domain": lambda value: np.array(value, np.float64)}
    usual = {tuple: " ".join}
    out = {key: say.get(key, usual.get(type(value), lambda value: value))(value)
           for key, value in facts.items() if value is not None}
    return {key: value for key, value in out.items() if value is not None}


def read_yaml(path, where):
    """The mapping in a YAML file, whose sentences begin with `where`."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UsageError(f"{where}: not a readable YAML file "
                         f"({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise UsageError(f"{where}: expected lines such as `boundary: periodic closed`.")
    return values


def _plain(value):
    """A value of Python, whatever h5py, numpy or zarr make of it."""
    if isinstance(value, h5py.Empty):
        return ""
    if isinstance(value, np.ndarray | np.generic):  # netCDF stores a number as an array of one
        value = value.item() if value.size == 1 and value.dtype.kind in "fiub" else value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _numeric(value):
    """A number, or a list of numbers: one for each sample."""
    if isinstance(value, list):
        return len(value) > 0 and all(map(_numeric, value)) and not isinstance(value[0], list)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value):
    if not isinstance(value, str):
        raise TypeError
    return value


def _words(value):
    return tuple(map(_text, value.split() if isinstance(value, str) else value))


def _parts(value):
    return [one for one in value.split(";") if one.strip()] if isinstance(value, str) else value


def _groups(value):
    groups = _parts(value)
    if groups and not isinstance(value, str) and all(
            isinstance(one, str) and " " not in one for one in groups):
        groups = [groups]  # one vector, as a plain list of its components
    return tuple(map(_words, groups))


def _mirrors(value):
    pairs = value.items() if isinstance(value, dict) else (
        one.partition(":")[::2] if isinstance(one, str) else one for one in _parts(value))
    return tuple((_text(axis).strip(), _words(odd or "")) for axis, odd in pairs)


def _domain(value):
    ends = np.array(value.split() if isinstance(value, str) else value, np.float64).reshape(-1, 2)
    if not np.isfinite(ends).all() or (ends[:, 0] == ends[:, 1]).any():
        raise ValueError
    return tuple(map(tuple, ends.tolist()))


def _truth(value):
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
        str(value).lower()]


def _step(value):
    if isinstance(value, bool) or not 0 < float(value) < float("inf"):
        raise ValueError
    return float(value)


READ = {  # each fact: how it is read, and an example
    "name": (_text, "mine"), "equation": (_text, "u_t + u u_x = 0"),
    "channels": (_words, "u v"), "inputs": (_words, "mask"), "params": (_words, "nu rho"),
    "axes": (_words, "x y"), "boundary": (_words, "periodic closed"),
    "domain": (_domain, "0 1 0 2"), "dt": (_step, 0.1), "first_frame": (int, 10),
    "vectors": (_groups, "vx vy; bx by"), "mirrors": (_mirrors, "x: vx; y: vy"),
    "conserved": (_words, "u"), "positive": (_words, "u"), "shifts": (_words, "x"),
    "linear": (_truth, True), "solenoidal": (_truth, True), "steady": (_truth, True)}
