"""Facts as files and people say them: attributes of HDF5, a YAML, the arguments of a writer.

A list is words separated by blanks (`boundary = "periodic closed"`), groups are separated by `;`
(`vectors = "vx vy; bx by"`), and a mirror names the channels that change sign behind its axis
(`mirrors = "x: u; y: v"`). YAML may use its own lists and mappings.
"""

import dataclasses
import difflib

import h5py
import numpy as np

from ups.config import UsageError
from ups.data.facts import Facts

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
            try:
                facts[key] = READ[key](value)
            except (TypeError, ValueError, KeyError):
                raise UsageError(f"{where}: {key} = {value!r} is not understood; write for "
                                 f"example {key} = {EXAMPLES.get(key, 1)!r}.") from None
        elif _numeric(value) and (strict or not isinstance(value, list)):
            params[key] = np.asarray(value, np.float64)
        elif strict:
            near = difflib.get_close_matches(key, READ, n=1, cutoff=0.0)[0]
            raise UsageError(f"{where}: {key} = {value!r} is neither a fact nor a number; the "
                             f"nearest fact is {near}.")
    return facts, params


def attributes(facts):
    """The inverse, for a file: {key: text, number or array} of facts that are said."""
    out = {}
    for key, value in facts.items():
        if key == "vectors":
            value = "; ".join(" ".join(group) for group in value)
        elif key == "mirrors":
            value = "; ".join(f"{axis}: {' '.join(odd)}" for axis, odd in value)
        elif key == "domain":
            value = np.array(value, np.float64)
        elif isinstance(value, tuple):
            value = " ".join(value)
        if value is not None:
            out[key] = value
    return out


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
    value = value.split() if isinstance(value, str) else value
    return tuple(map(_text, value))


def _groups(value):
    if isinstance(value, str):
        value = [one for one in value.split(";") if one.strip()]
    elif value and not any(isinstance(one, list) or " " in one for one in value):
        value = [value]  # one vector, as a plain list of its components
    return tuple(map(_words, value))


def _mirrors(value):
    if isinstance(value, str):
        value = [one for one in value.split(";") if one.strip()]
    if isinstance(value, dict):
        value = list(value.items())
    pairs = [one.partition(":")[::2] if isinstance(one, str) else one for one in value]
    return tuple((_text(axis).strip(), _words(odd or "")) for axis, odd in pairs)


def _domain(value):
    value = value.split() if isinstance(value, str) else value
    ends = np.asarray(value, np.float64).reshape(-1, 2)
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


KINDS = {str: _text, float: _step, int: int, bool: _truth}
READ = {field.name: KINDS.get(field.type, _words) for field in dataclasses.fields(Facts)
        if field.name not in MEASURED} | {"vectors": _groups, "mirrors": _mirrors,
                                          "domain": _domain}
EXAMPLES = {"vectors": "vx vy", "mirrors": "x: vx; y: vy", "domain": "0 1 0 2", "linear": True,
            "solenoidal": True, "steady": True, "boundary": "periodic closed", "axes": "x y",
            "dt": 0.1, "name": "mine", "equation": "u_t + u u_x = 0"}
EXAMPLES |= {key: "u v" for key in ("channels", "inputs", "conserved", "positive")}
EXAMPLES |= {"params": "nu rho", "shifts": "x"}
