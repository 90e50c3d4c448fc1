"""Facts are checked on the data before any training; some are proposed, none is assumed."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np

from ups.config import UsageError
from ups.data.moments import (
    COPIES,
    LEAST,
    divergence,
    mirror_doubt,
    moments,
    nonlinear,
    shift_doubt,
)

MOST, READ = 64, 2**28      # trajectories that are looked at, and bytes but for large frames
UNLIKELY = 0.02             # what nobody said is not used below this probability ..
REFUSED = 1 / (COPIES + 1)  # .. and what is said is refused where no copy reaches the data
SEAM = 2.0                  # a jump across the ends of a periodic axis, in jumps inside
MOVES = 1e-3                # a conserved mean, in rms of the channel: more than rounding


class Look:
    """At most 64 trajectories of training, of different samples, and their moments.

    At all points of their grid: a mean over some of them is not conserved.
    """

    def __init__(self, fields):
        indices = np.asarray(fields.split("train"))
        self.fields = fields = copy.copy(fields)
        fields.facts = facts = replace(fields.facts, grid=fields.files[0].facts.grid)
        fields.stride_x = 1
        order = np.random.default_rng(0).permutation(indices if len(indices) else len(fields))
        first = np.sort(np.unique(fields.sample[order], return_index=True)[1])
        frame = 4 * len(facts.channels) * math.prod(facts.grid)  # bytes
        self.rows = np.sort(order[first[:min(MOST, max(LEAST, READ // (2 * frame)))]])
        count = min(32, max(2, READ // (frame * max(1, len(self.rows)))))
        self.frames = slice(None, None, max(1, (facts.frames - 1) // (count - 1)))
        if facts.steady:
            self.frames = slice(1, None)

        self.seen = moments(facts.channels, (self.read([row]) for row in self.rows))
        self.given = moments(facts.inputs, (fields.inputs([row], self.frames).numpy()
                                            for row in self.rows)) if facts.inputs else None

    def read(self, rows):
        """Values (n, T, C, *grid) of at most 32 frames, evenly spaced, or of the answer."""
        return self.fields.read(rows, self.frames).numpy()

    def drift(self):
        """For each channel, how far its mean moves, in rms of the channel."""
        mean, scale = self.seen.mean, self.seen.scale
        size = np.sqrt((np.square(scale) + np.square(mean).mean(1)).mean(0)) + 1e-30
        return abs(mean - mean[:, :1]).max((0, 1)) / size


def check_said(fields):
    """Refuse facts that the data contradict, each with its number."""
    if found := " ".join(contradictions(fields)):
        raise UsageError(f"{fields.files[0].path}: {found} Correct that in the file or by "
                         "--facts, or --tasks where that says it.")


def contradictions(fields):
    """Yield a sentence for every fact that the data contradict."""
    facts, look = fields.facts, fields.look
    seen, given, n = look.seen, look.given, len(look.rows)
    place = {axis: k for k, axis in enumerate(facts.axes)} | {"": None}
    for name, moved in zip(facts.channels, look.drift(), strict=True):
        if name in facts.conserved and moved > MOVES:
            yield (f"The mean of {name} is said to be conserved, but moves by {moved:.2g} of its "
                   "rms.")
    for one in filter(None, (seen, given)):
        for name, low, high in zip(one.names, one.low.min(0), one.high.max(0), strict=True):
            if name in facts.positive and low < -1e-5 * abs(high):
                yield f"{name} is said to be positive, but falls to {low:.3g}."
    for axis, circle, jump in zip(facts.axes, facts.periodic, seam(fields.files[0]),
                                  strict=True):
        if circle and jump > 1.5 * SEAM:
            yield (f"Axis {axis} is said to be periodic, but the jump across its ends is "
                   f"{jump:.2g} times those inside; a last point that repeats the first must be "
                   "left out.")
    for axis in facts.shifts or ():
        chance, share, name = shift_doubt(seen, place[axis])
        if chance <= REFUSED and share > 0.05 and not (given and _uneven(given, place[axis])):
            yield (f"Solutions are said to shift along {axis}, but averages of {name} over {n} "
                   f"trajectories depend on {axis} by {100 * share:.2g} % of its spread.")
    for axis, odd in facts.mirrors:
        chance, share, name = mirror_doubt(seen, place[axis], odd)
        if chance <= REFUSED and not (
                given and mirror_doubt(given, place[axis], odd)[0] <= UNLIKELY):
            yield (f"Mirrors name {_mirror(axis, odd)}, but an average of {name} that it turns "
                   f"round has one sign in most of {n} trajectories (mean {share:.2g} of rms; "
                   f"chance gives {n ** -0.5:.2g}).")
    some = look.rows[:16]
    if facts.linear and facts.shifts == facts.axes and not facts.inputs:
        same = (fields.params(some) == fields.params(some[:1])).all(1).numpy()
        if (rest := nonlinear(look.read(some[same]))) > 0.2:
            yield (f"The equation is said to be linear, but {100 * rest:.0f} % of a step is no "
                   "linear map of the field.")
    spacing = [(b - a) / points for (a, b), points in
               zip(facts.domain, fields.files[0].facts.grid, strict=True)]
    for vector in facts.vectors if facts.solenoidal else ():
        u = look.read(some)[:, :, [facts.channels.index(name) for name in vector]]
        if (rest := divergence(u, spacing)) > 0.5:
            yield (f"{' '.join(vector)} is said to have no divergence, but it is {rest:.2g} of "
                   "the gradient.")


def proposals(fields):
    """Yield what the data support and nobody said: questions for who knows the equation."""
    facts, look, seen = fields.facts, fields.look, fields.look.seen
    for name, moved, low in zip(facts.channels, look.drift(), seen.low.min(0), strict=True):
        if name not in facts.conserved and moved < 1e-5 and not facts.steady:
            yield f"the mean of {name} is constant to {moved:.1g}: add conserved = {name}?"
        if name not in facts.positive and low >= 0:
            yield f"{name} is never below {low:.3g}: add positive = {name}?"
    said = {axis for axis, _ in facts.mirrors}
    for k, axis in enumerate(facts.axes if len(look.rows) >= 4 * LEAST else ()):
        signs = [odd for n in range(3) for odd in itertools.combinations(facts.channels, n)]
        for odd in signs if axis not in said and not facts.inputs else ():
            chance, share, _ = mirror_doubt(seen, k, odd)
            if chance > 0.1 and share:
                yield f"the data do not contradict the {_mirror(axis, odd)}: add it to mirrors?"
                break


def uses(facts):
    """One line of what training makes of the facts."""
    said = [f"shifts along {' and '.join(facts.shifts)}"] if facts.shifts else []
    said += [_mirror(axis, odd) for axis, odd in facts.mirrors]
    said += ["sums of solutions"] if facts.linear and facts.shifts else []
    said += [f"mean of {' and '.join(facts.conserved)} kept"] if facts.conserved else []
    return "; ".join(said) or "no symmetry, nothing conserved"


def seam(file):
    """For each axis, jumps across its ends over jumps inside, of values and slopes; 1 is usual.

    Slopes, because two ends that are held at zero agree in value. Of the later half of at most 32
    trajectories, the upper quartile: a few have a shock there.
    """
    half, kept = file.facts.frames // 2, []
    frames = range(half, file.facts.frames, -(-(file.facts.frames - half) // 8))
    for row in range(0, file.samples, -(-file.samples // 32)):
        u = file.read([row], frames)[0].astype(np.float64)
        if np.isfinite(u).all():
            kept.append([_seam(np.moveaxis(u, axis, -1)) for axis in range(2, u.ndim)])
    return np.quantile(kept, 0.75, axis=0).tolist() if kept else [0.0] * len(file.facts.grid)


def _seam(u):
    """Of the last axis of u (T, C, .., L)."""
    ratios, rest = [], (0, *range(2, u.ndim))
    for order in (1, 2) if u.shape[-1] > 3 else ():
        ends = np.diff(np.concatenate([u[..., -order:], u[..., :order]], -1), n=order)
        size = np.maximum(u.std(axis=rest)**2, 1e-60)  # (C,)
        across, inside = ((np.square(jump).mean(rest) / size).sum()
                          for jump in (ends, np.diff(u, n=order)))
        ratios.append(math.sqrt(across / (inside + 1e-30)))
    return max(ratios, default=0.0)


def shiftable(fields, axes):
    """Those of `axes` along which no average over trajectories depends on the place.

    Inputs shift along, so theirs may.
    """
    return tuple(axis for axis in axes if len(fields.look.rows) >= LEAST
                 and not _uneven(fields.look.seen, fields.facts.axes.index(axis)))


def _uneven(seen, axis):
    return shift_doubt(seen, axis)[0] <= UNLIKELY


def _mirror(axis, odd):
    signs = " and ".join(f"{name} -> -{name}" for name in odd)
    return (f"mirror of {axis}" + (f" with {signs}" if odd else "")) if axis else signs
