"""Facts are checked on the data before any training; some are proposed, none is assumed."""

import copy
import itertools
import math
from contextlib import suppress
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


def check_said(fields):
    """Refuse facts that the data contradict, each with its number."""
    if found := contradictions(fields):
        raise UsageError(f"{fields.files[0].path}: {' '.join(found)} Correct that in the file or "
                         "by --facts, or --tasks where that says it.")


def contradictions(fields):
    """A sentence for every fact that at most 64 trajectories of training contradict."""
    fields = _whole(fields)
    facts, found = fields.facts, []
    rows = _chosen(fields, fields.split("train"))
    seen, given = moments(_pieces(fields, rows)), None
    if facts.inputs:
        given = moments(fields.inputs(rows[k:k + 1], _frames(fields, rows)).numpy()
                        for k in range(len(rows)))
    for c, moved in enumerate(_drift(seen)):
        if facts.channels[c] in facts.conserved and moved > MOVES:
            found.append(f"The mean of {facts.channels[c]} is said to be conserved, but moves by "
                         f"{moved:.2g} of its rms.")
    for names, one in ((facts.channels, seen), (facts.inputs, given)):
        for c, name in enumerate(names):
            low, size = one.low[:, c].min(), abs(one.high[:, c]).max()
            if name in facts.positive and low < -1e-5 * size:
                found.append(f"{name} is said to be positive, but falls to {low:.3g}.")
    for axis, jump in zip(facts.axes, seam(fields.files[0], range(fields.files[0].samples)),
                          strict=True):
        if facts.boundary[facts.axes.index(axis)] == "periodic" and jump > 1.5 * SEAM:
            found.append(f"Axis {axis} is said to be periodic, but the jump across its ends is "
                         f"{jump:.2g} times those inside; a last point that repeats the first "
                         "must be left out.")
    for axis in facts.shifts or ():
        chance, share, c = shift_doubt(seen, k := facts.axes.index(axis))
        if chance <= REFUSED and share > 0.05 and not (given and _uneven(given, k)):
            found.append(f"Solutions are said to shift along {axis}, but averages of "
                         f"{facts.channels[c]} over {len(rows)} trajectories depend on {axis} by "
                         f"{100 * share:.2g} % of its spread.")
    for axis, odd in facts.mirrors:
        k = facts.axes.index(axis) if axis else None
        chance, share, c = mirror_doubt(seen, k, _places(odd, facts.channels))
        if chance <= REFUSED and (not given or mirror_doubt(
                given, k, _places(odd, facts.inputs))[0] > UNLIKELY):
            found.append(f"Mirrors name {_mirror(axis, odd)}, but an average of "
                         f"{facts.channels[c]} that it turns round has one sign in most of "
                         f"{len(rows)} trajectories (mean {share:.2g} of rms; chance gives "
                         f"{len(rows) ** -0.5:.2g}).")
    u = next(_pieces(fields, rows))
    if facts.linear and facts.shifts == facts.axes and not facts.inputs:
        same = (fields.params(rows[:len(u)]) == fields.params(rows[:1])).all(1).numpy()
        if (rest := nonlinear(u[same])) > 0.2:
            found.append(f"The equation is said to be linear, but {100 * rest:.0f} % of a step is "
                         "no linear map of the field.")
    if facts.solenoidal:
        for vector in facts.vectors:
            if (rest := divergence(u, _places(vector, facts.channels), facts)) > 0.5:
                found.append(f"{' '.join(vector)} is said to have no divergence, but it is "
                             f"{rest:.2g} of the gradient.")
    return found


def proposals(fields):
    """What the data support and nobody said: questions for who knows the equation."""
    fields = _whole(fields)
    facts, found = fields.facts, []
    rows = _chosen(fields, fields.split("train"))
    seen = moments(_pieces(fields, rows))
    for name, moved, low in zip(facts.channels, _drift(seen), seen.low.min(0), strict=True):
        if name not in facts.conserved and moved < 1e-5 and not facts.steady:
            found.append(f"the mean of {name} is constant to {moved:.1g}: add conserved = {name}?")
        if name not in facts.positive and low >= 0:
            found.append(f"{name} is never below {low:.3g}: add positive = {name}?")
    if len(rows) < 4 * LEAST or facts.inputs:
        return found
    said = {axis for axis, _ in facts.mirrors}
    for k, axis in enumerate(facts.axes):
        for odd in itertools.chain.from_iterable(
                itertools.combinations(facts.channels, n) for n in range(3)):
            chance, share, _ = mirror_doubt(seen, k, _places(odd, facts.channels))
            if axis not in said and chance > 0.1 and share:
                found.append(f"the data do not contradict the {_mirror(axis, odd)}: add it to "
                             "mirrors?")
                break
    return found


def uses(facts):
    """One line of what training makes of the facts."""
    said = [f"shifts along {' and '.join(facts.shifts)}"] if facts.shifts else []
    said += [_mirror(axis, odd) for axis, odd in facts.mirrors]
    said += ["sums of solutions"] if facts.linear and facts.shifts else []
    said += [f"mean of {' and '.join(facts.conserved)} kept"] if facts.conserved else []
    return "; ".join(said) or "no symmetry, nothing conserved"


def seam(file, rows):
    """For each axis, jumps across its ends over jumps inside, of values and slopes; 1 is usual.

    Slopes, because two ends that are held at zero agree in value. Of the later half of at most 32
    trajectories, the upper quartile: a few have a shock there.
    """
    rows, half = rows[::-(-len(rows) // 32)], file.facts.frames // 2
    frames, kept = range(half, file.facts.frames, -(-(file.facts.frames - half) // 8)), []
    for row in rows:
        with suppress(UsageError):  # one that cannot be read is told by who needs it
            u = file.read([row], frames)[0].astype(np.float64)
            ratios = [_seam(np.moveaxis(u, axis, -1)) for axis in range(2, u.ndim)]
            kept += [ratios] if np.isfinite(u).all() else []
    return np.quantile(kept, 0.75, axis=0).tolist() if kept else [0.0] * len(file.facts.grid)


def _seam(u):
    ratios = []
    for order in (1, 2) if u.shape[-1] > 3 else ():
        ends = np.diff(np.concatenate([u[..., -order:], u[..., :order]], -1), n=order)
        size = np.maximum(u.std(axis=(0, *range(2, u.ndim)))**2, 1e-60)  # (C,)
        across, inside = ((np.square(jump).mean((0, *range(2, u.ndim))) / size).sum()
                          for jump in (ends, np.diff(u, n=order)))
        ratios.append(math.sqrt(across / (inside + 1e-30)))
    return max(ratios, default=0.0)


def shiftable(fields, indices, axes):
    """Those of `axes` along which no average over trajectories depends on the place.

    Inputs shift along, so theirs may.
    """
    rows = _chosen(fields, indices)
    with suppress(UsageError):  # what cannot be read is told by who needs it
        if len(rows) >= LEAST:
            seen = moments(_pieces(fields, rows))
            return [axis for axis in axes if not _uneven(seen, fields.facts.axes.index(axis))]
    return []


def _whole(fields):
    """The same fields at all points of their grid: a mean over some of them is not conserved."""
    whole = copy.copy(fields)
    whole.stride_x, whole.facts = 1, replace(fields.facts, grid=fields.files[0].facts.grid)
    return whole


def _chosen(fields, indices):
    """At most 64 of `indices`, of different samples: those of a family begin alike."""
    indices = np.random.default_rng(0).permutation(np.asarray(indices))
    first = np.unique(fields.sample[indices], return_index=True)[1]
    size = 8 * len(fields.facts.channels) * math.prod(fields.facts.grid)  # of two frames
    return np.sort(indices[np.sort(first)[:min(MOST, max(LEAST, READ // size))]])


def _frames(fields, rows):
    """At most 32 frames, evenly spaced, within READ; of a steady problem the solution."""
    if fields.facts.steady:
        return slice(1, None)
    size = 4 * len(rows) * len(fields.facts.channels) * math.prod(fields.facts.grid)
    count = min(32, max(2, READ // size))
    return slice(None, None, max(1, (fields.facts.frames - 1) // (count - 1)))


def _pieces(fields, rows):
    """Yield u (n, T, C, *grid) of some trajectories, below 32 MB where one of them is."""
    frames = _frames(fields, rows)
    size = len(range(fields.facts.frames)[frames]) * 4 * len(fields.facts.channels)
    step = max(1, 2**25 // (size * math.prod(fields.facts.grid)))
    for k in range(0, len(rows), step):
        yield fields.read(rows[k:k + step], frames).numpy()


def _uneven(seen, axis):
    return shift_doubt(seen, axis)[0] <= UNLIKELY


def _drift(seen):
    """For each channel, how far its mean moves, in rms of the channel."""
    size = np.sqrt((np.square(seen.scale) + np.square(seen.mean).mean(1)).mean(0)) + 1e-30
    return abs(seen.mean - seen.mean[:, :1]).max((0, 1)) / size


def _places(names, channels):
    return [channels.index(name) for name in names if name in channels]


def _mirror(axis, odd):
    signs = " and ".join(f"{name} -> -{name}" for name in odd)
    return (f"mirror of {axis}" + (f" with {signs}" if odd else "")) if axis else signs
