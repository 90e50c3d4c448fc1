"""What is true of a data set: one value that travels with it, into the codec and every model.

A file says what it knows, as attributes or in a YAML; `Fields` completes it (strides, scales of the
parameters, and by tests on the data the boundary and the shifts that nobody mentions). Nothing else
is ever assumed. Models, training and evaluation ask these facts, never for a name.

Where people say facts, a list is words separated by blanks (`boundary = "periodic closed"`), and a
mirror names the channels that change sign behind its axis (`mirrors = "x: u; y: v"`). YAML may use
its own lists and mappings.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
import yaml

from ups.config import UsageError

BOUNDARIES = ("periodic", "closed")  # closed: a wall, open, outflow; all that is not periodic
MEASURED = {"grid", "frames", "inputs_vary", "scales"}  # never said, but seen in the data


@dataclass(frozen=True)
class Scale:
    """How a parameter becomes a condition: (x - center) / width, of log10 x where `log`."""

    log: bool
    center: float
    width: float
    low: float   # least and largest value of training
    high: float


@dataclass(frozen=True)
class Facts:
    """Of every trajectory of a data set, as training sees it: after strides and the first frame."""

    name: str                                # of folders and titles
    channels: tuple[str, ...]                # that are predicted, in order
    axes: tuple[str, ...]                    # space axes in stored order
    grid: tuple[int, ...]
    boundary: tuple[str, ...]                # periodic or closed, for each axis; "" where not said
    domain: tuple[tuple[float, float], ...]  # of each axis, from end to end of its cells
    dt: float
    frames: int
    equation: str = ""                       # words for people
    inputs: tuple[str, ...] = ()             # channels that are given at every step
    inputs_vary: bool = False                # in time; else one frame of them holds for all
    params: tuple[str, ...] = ()
    scales: tuple[Scale, ...] = ()           # one for each of `params`
    conserved: tuple[str, ...] = ()          # channels whose mean over space never changes
    positive: tuple[str, ...] = ()           # channels that never fall below zero
    mirrors: tuple[tuple[str, tuple[str, ...]], ...] = ()  # an axis that may be mirrored ("": none)
    #                                          and the channels that change sign with it
    shifts: tuple[str, ...] | None = None    # axes along which a solution may be moved
    linear: bool = False                     # sums of solutions are solutions
    steady: bool = False                     # two frames: nothing, and the answer to the inputs
    first_frame: int = 0                     # frames before it are left out

    def __post_init__(self):
        if self.name in (".", "..") or {"/", "\\"} & set(self.name):
            raise UsageError(f"a data set cannot be called {self.name!r}: folders bear its name.")

    @property
    def periodic(self):
        """One truth value for each axis."""
        return tuple(kind == "periodic" for kind in self.boundary)

    def condition(self, params):
        """Raw parameters (n, P) as models want them: float32, scaled."""
        columns = [((x.log10() if scale.log else x) - scale.center) / scale.width
                   for x, scale in zip(params.double().unbind(1), self.scales, strict=True)]
        return torch.stack(columns, 1).float() if columns else torch.zeros(len(params), 0)

    def plain(self):
        """Values for JSON."""
        return dataclasses.asdict(self)

    def said(self):
        """Those that a file can say beside its arrays, where anything is said."""
        return {key: getattr(self, key) for key in READ
                if key != "params" and getattr(self, key) not in ((), "", 0.0)}


def from_plain(values):
    """The inverse of `Facts.plain`."""
    scales = tuple(Scale(**one) for one in values["scales"])
    return Facts(**{field.name: _tuples(values[field.name]) for field in dataclasses.fields(Facts)
                    if field.name in values} | {"scales": scales})


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def scale_of(values):
    """The scale of a parameter, from its values (n,) in training."""
    low, high = values.min().item(), values.max().item()
    log = low > 0 and high >= 10 * low
    seen = (values.log10() if log else values).double()
    center, width = seen.mean().item(), seen.std(correction=0).item()
    if width <= 1e-9 * max(abs(low), abs(high)):  # one value: others are told in its own units
        width = abs(center) or 1.0
    return Scale(log, center, width, low, high)


def check_facts(facts, where):
    """Refuse facts that name what is not there; `where` opens the sentence."""
    names, closed = facts.channels + facts.inputs, [
        axis for axis, kind in zip(facts.axes, facts.boundary, strict=False) if kind == "closed"]
    for fact, words, known in (
            ("boundary", facts.boundary, (*BOUNDARIES, "")),
            ("shifts", facts.shifts, {*facts.axes} - {*closed}),
            ("conserved", facts.conserved, facts.channels), ("positive", facts.positive, names),
            ("mirrors", [axis for axis, _ in facts.mirrors], (*facts.axes, "")),
            ("mirrors' signs", sum((odd for _, odd in facts.mirrors), ()), names)):
        for word in {*(words or ())} - {*known}:
            raise UsageError(f"{where}: {fact} names {word!r}; it may name "
                             f"{', '.join(sorted(filter(None, known))) or 'nothing here'}.")
    for fact, values in (("boundary", facts.boundary), ("domain", facts.domain)):
        if len(values) != len(facts.axes):
            raise UsageError(f"{where}: {fact} is {values}; say it for each of the axes "
                             f"{' '.join(facts.axes)}.")


# facts as files and people say them

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
        elif type(value) in (int, float) or strict and _numbers(value) is not None:
            params[key] = _numbers(value)
        elif strict:
            near = difflib.get_close_matches(key, READ, n=1, cutoff=0.0)[0]
            raise UsageError(f"{where}: {key} = {value!r} is neither a fact nor a number; the "
                             f"nearest fact is {near}.")
    return facts, params


def attributes(facts):
    """The inverse, for a file: {key: text, number or array} of facts that are said."""
    say = {"domain": np.ravel,  # netCDF-4 opens no attribute of two axes
           "mirrors": lambda value: "; ".join(f"{axis}: {' '.join(odd)}" for axis, odd in value)}
    said = {key: value for key, value in facts.items()
            if value is not None and not (key == "boundary" and "" in value)}
    return {key: say[key](value) if key in say else
            " ".join(value) if isinstance(value, tuple) else value for key, value in said.items()}


def read_yaml(path, where):
    """The mapping in a YAML file, whose sentences begin with `where`."""
    try:
        return dict(yaml.safe_load(Path(path).read_text()) or {})
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{where}: expected lines such as `boundary: periodic closed` "
                         f"({' '.join(str(error).split())}).") from None


def words(value):
    """A list of words: text with blanks between them, or what a file makes of a list."""
    value = _plain(value)
    return tuple(value.split() if isinstance(value, str) else map(str, value))


def beside(path):
    """What a YAML file beside the data says, if there is one."""
    return read_yaml(path, path) if path.is_file() else {}


def _plain(value):
    """A value of Python, whatever h5py, numpy or zarr make of it."""
    if isinstance(value, np.ndarray | np.generic):  # netCDF stores a number as an array of one
        value = value.item() if value.size == 1 and value.dtype.kind in "fiub" else value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if isinstance(value, h5py.Empty) else value


def _numbers(value):
    """A number, or one for each sample, as an array; None of anything else."""
    try:  # YAML takes 1e-3 for text, and True is 1
        return None if np.asarray(value).dtype.kind == "b" else np.array(value, np.float64)
    except (TypeError, ValueError):
        return None


def _mirrors(value):
    if isinstance(value, str):
        value = [one.partition(":")[::2] for one in value.split(";") if one.strip()]
    return tuple((axis.strip(), words(odd or "")) for axis, odd in dict(value).items())


def _domain(value):
    ends = np.array(words(value) if isinstance(value, str) else value, float).reshape(-1, 2)
    if not np.isfinite(ends).all() or (ends[:, 0] == ends[:, 1]).any():
        raise ValueError
    return tuple(map(tuple, ends.tolist()))


def _truth(value):
    return ("false", "true", "no", "yes", "0", "1").index(str(value).lower()) % 2 == 1


def _frame(value):
    if int(value) != float(value) or int(value) < 0:
        raise ValueError
    return int(value)


def _step(value):
    if not 0 < float(value) < float("inf"):
        raise ValueError
    return float(value)


READ = {  # each fact: how it is read, and an example
    "name": (str, "mine"), "equation": (str, "u_t + u u_x = 0"),
    "channels": (words, "u v"), "inputs": (words, "mask"), "params": (words, "nu rho"),
    "axes": (words, "x y"), "boundary": (words, "periodic closed"),
    "domain": (_domain, "0 1 0 2"), "dt": (_step, 0.1), "first_frame": (_frame, 10),
    "mirrors": (_mirrors, "x: vx; y: vy"), "conserved": (words, "u"), "positive": (words, "u"),
    "shifts": (words, "x"), "linear": (_truth, True), "steady": (_truth, True)}
