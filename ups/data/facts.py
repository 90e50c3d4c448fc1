"""What is true of a data set: one value that travels with it, into the codec and every model.

A file says what it knows; `Fields` completes it (strides, scales of the parameters, and by tests on
the data the boundary and the shifts that a file does not mention). Nothing else is ever assumed.
Models, training and evaluation ask these facts, never for a name.
"""

import dataclasses
from dataclasses import dataclass

import torch

from ups.config import UsageError

BOUNDARIES = ("periodic", "closed")  # closed: a wall, open, outflow; all that is not periodic


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
    vectors: tuple[tuple[str, ...], ...] = ()  # channels that are components along the axes
    conserved: tuple[str, ...] = ()          # channels whose mean over space never changes
    positive: tuple[str, ...] = ()           # channels that never fall below zero
    mirrors: tuple[tuple[str, tuple[str, ...]], ...] = ()  # an axis that may be mirrored ("": none)
    #                                          and the channels that change sign with it
    shifts: tuple[str, ...] | None = None    # axes along which a solution may be moved
    linear: bool = False                     # sums of solutions are solutions
    solenoidal: bool = False                 # the vectors have no divergence
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
        columns = [torch.as_tensor(column).double() for column in params.unbind(1)]
        for k, scale in enumerate(self.scales):
            x = columns[k].log10() if scale.log else columns[k]
            columns[k] = (x - scale.center) / scale.width
        return torch.stack(columns, 1).float() if columns else torch.zeros(len(params), 0)

    def plain(self):
        """Values for JSON."""
        return dataclasses.asdict(self)


def from_plain(values):
    """The inverse of `Facts.plain`."""
    known = {field.name for field in dataclasses.fields(Facts)}
    values = {key: _tuples(value) for key, value in values.items() if key in known}
    scales = tuple(Scale(**dict(scale)) for scale in values.pop("scales", ()))
    return Facts(**values, scales=scales)


def scale_of(values):
    """The scale of a parameter, from its values (n,) in training."""
    values = values.double()
    low, high = values.min().item(), values.max().item()
    log = low > 0 and high >= 10 * low
    seen = values.log10() if log else values
    center, width = seen.mean().item(), seen.std(correction=0).item()
    if width <= 1e-9 * max(abs(low), abs(high)):  # one value: others are told in its own units
        width = abs(center) or 1.0
    return Scale(log, center, width, low, high)


def check_facts(facts, where):
    """Refuse facts that name what is not there; `where` opens the sentence."""
    channels = {*facts.channels, *facts.inputs}
    circles = {axis for axis, kind in zip(facts.axes, facts.boundary, strict=False)
               if kind != "closed"}
    named = {"boundary": (facts.boundary, {*BOUNDARIES, ""}), "shifts": (facts.shifts, circles),
             "conserved": (facts.conserved, {*facts.channels}),
             "positive": (facts.positive, channels), "vectors": (sum(facts.vectors, ()), channels),
             "mirrors": ([axis for axis, _ in facts.mirrors], {*facts.axes, ""}),
             "mirrors' signs": (sum((odd for _, odd in facts.mirrors), ()), channels)}
    for fact, (words, known) in named.items():
        for word in words or ():
            if word not in known:
                known = ", ".join(sorted(filter(None, known))) or "nothing here"
                raise UsageError(f"{where}: {fact} names {word!r}; it may name {known}.")
    for words in (facts.channels, facts.axes):
        if not words or len({*words}) < len(words):
            raise UsageError(f"{where}: channels {facts.channels} and axes {facts.axes}: at least "
                             "one of each, and no name twice.")
    if len(facts.boundary) != len(facts.axes):
        raise UsageError(f"{where}: boundary {' '.join(facts.boundary)!r} has "
                         f"{len(facts.boundary)} words for the {len(facts.axes)} axes "
                         f"{' '.join(facts.axes)}; give one for each axis.")


def _tuples(value):
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
