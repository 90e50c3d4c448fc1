"""Facts are checked on the data before any training; some are proposed, none is assumed.

That a shift or a mirror image of a solution is a solution is tested by Monte-Carlo (Fisher, 1935).
Where it is true, doing it at random to each of n trajectories changes no statistic of them all. So
those of the data, |sum of x|^2 / sum of |x|^2 of many averages x of a trajectory, must not stand
out among those of `COPIES` such copies.
"""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np

from ups.config import UsageError

MOST, BYTES = 64, 2**28     # trajectories that are looked at, and bytes but for large frames
LEAST = 8                   # trajectories, of which something can be said
MODES = 32                  # of profiles along an axis: the longest waves
COPIES = 1999
UNLIKELY = 0.02             # what nobody said is not used below this probability ..
REFUSED = 1 / (COPIES + 1)  # .. and what is said is refused where no copy reaches the data
SEAM = 2.0                  # a jump across the ends of a periodic axis, in jumps inside
MOVES = 1e-3                # a conserved mean, in rms of the channel: more than rounding


class Look:
    """At most 64 trajectories of training, of different samples, and their averages.

    At all points of their grid, since a mean over some of them is not conserved, and at most 32
    frames, evenly spaced; of a steady field at the answer.
    """

    def __init__(self, fields):
        self.fields = fields = copy.copy(fields)
        fields.facts = facts = replace(fields.facts, grid=fields.files[0].facts.grid)
        fields.stride_x = 1
        indices = np.asarray(fields.split("train"))
        order = np.random.default_rng(0).permutation(indices if len(indices) else len(fields))
        first = np.sort(np.unique(fields.sample[order], return_index=True)[1])
        frame = 4 * len(facts.channels) * math.prod(facts.grid)  # bytes
        self.rows = np.sort(order[first[:min(MOST, max(LEAST, BYTES // (2 * frame)))]])
        count = min(32, max(2, BYTES // (frame * max(1, len(self.rows)))))
        step = max(1, (facts.frames - 1) // (count - 1))
        self.frames = slice(1, None) if facts.steady else slice(None, None, step)

        def averages(rows, inputs=False):
            return Averages(facts.inputs if inputs else facts.channels, facts.axes,
                            (fields.read([row], self.frames, inputs)[0] for row in rows))

        self.seen = averages(self.rows)
        self.given = facts.inputs and averages(self.rows, inputs=True)
        # of each axis, the upper quartile: a few trajectories, or pieces of one, have a shock there
        seams = (self.seen if len(self.rows) >= LEAST else averages(order[:32])).seams
        self.seams = [np.quantile(seams[axis], 0.75, method="lower").item() for axis in facts.axes]


class Averages:
    """Averages over each of n trajectories (T, C, *grid), and v is u without its mean.

    mean (n, T, C) over space; deviation, low and high (n, C); and for each axis profiles
    (n, 3, C, L) of u, v^2 and (v_t)^2, products (n, 4, C, C + 1): v v, v v_x, v_t v_x and v_t v of
    two channels, and v^3, v_x^3, v v_t v_x and v^2 v_t of one; and the seam (n,).
    """

    def __init__(self, names, axes, trajectories):
        parts = map(np.stack, zip(*map(_averages, trajectories), strict=True))
        self.names, (self.mean, self.deviation, self.low, self.high, *rest) = names, parts
        self.profiles, self.products, self.seams = (
            dict(zip(axes, rest[k::3], strict=True)) for k in range(3))
        self.size = np.sqrt(np.square(self.deviation).mean(0)) + 1e-30  # (C,)

    def drift(self):
        """For each channel, how far its mean moves, in rms of the channel."""
        size = np.sqrt(self.size**2 + np.square(self.mean).mean((0, 1)))
        return abs(self.mean - self.mean[:, :1]).max((0, 1)) / size

    def scaled(self, axis):
        """Profiles in units of the spread of u, of its square, and of the mean change."""
        change = self.profiles[axis][:, 2].mean((0, 2)) + 1e-30
        return self.profiles[axis] / np.stack([self.size, self.size**2, change])[..., None]


def _averages(u):
    u = np.ascontiguousarray(np.asarray(u).swapaxes(0, 1), np.float64)  # (C, T, *grid)
    every = tuple(range(1, u.ndim))
    v = u - u.mean(every, keepdims=True)
    change = np.diff(u, axis=1) if u.shape[1] > 1 else 0 * u
    w = (v[:, 1:] + v[:, :-1]) / 2 if u.shape[1] > 1 else v
    out = [u.mean(every[1:]).T, v.std(every), u.min(every), u.max(every)]
    for axis in every[1:]:
        rest = tuple({*every} - {axis})
        slope = np.gradient(w, axis=axis) if w.shape[axis] > 1 else 0 * w
        products = [np.column_stack([a.reshape(len(a), -1) @ b.reshape(len(b), -1).T,
                                     cube.sum(every)])
                    for a, b, cube in ((w, w, w * w * w), (w, slope, slope * slope * slope),
                                       (change, slope, w * change * slope),
                                       (change, w, w * w * change))]
        out += [np.stack([x.mean(rest) for x in (u, v * v, change * change)]),
                np.stack(products) / w[0].size,
                _seam(np.moveaxis(u[:, u.shape[1] // 2:], axis, -1))]
    return out


def _seam(u):
    """Jumps across the ends of the last axis of u (C, T, .., L) over jumps inside; 1 is usual.

    Of values or of slopes, because two ends that are held at zero agree in value. It is infinite
    where the last point repeats the first: both ends are always equal, and move.
    """
    if u.shape[-1] < 3:
        return 0.0
    first, near = u[..., 0], 1e-3 * math.sqrt(np.square(np.diff(u)).mean())
    if abs(u[..., -1] - first).max() <= near and (
            abs(first - first[:, :1]).max() > near > 1e-7 * abs(u).max()):
        return math.inf
    rest, jumps = tuple(range(1, u.ndim)), []
    size = np.maximum(u.var(rest), 1e-60)  # (C,)
    for n in (1, 2):
        ends = np.concatenate([u[..., -n:], u[..., :n]], -1)
        across, inside = ((np.square(np.diff(x, n=n)).mean(rest) / size).sum() for x in (ends, u))
        jumps.append(math.sqrt(across / (inside + 1e-30)))
    return max(jumps)


def shift_doubt(seen, axis):
    """(probability of chance, by which share averages vary along an axis, of which channel)."""
    p = seen.scaled(axis)
    if p.shape[-1] == 1:
        return 1.0, 0.0, seen.names[0]
    modes = np.fft.rfft(p, norm="forward")[..., 1:MODES + 1]
    x = modes.transpose(3, 0, 1, 2).reshape(modes.shape[-1], len(p), -1)  # (K, n, 3 C)
    moves = np.random.default_rng(0).integers(p.shape[-1], size=(COPIES + 1, len(p)))
    moves[0] = 0  # the data themselves
    wave = -2j * np.pi / p.shape[-1] * np.arange(1, len(x) + 1)[:, None]
    turns = np.exp(wave * np.arange(p.shape[-1]))[:, moves]
    chance, (k, best), _ = _stands_out(x, turns)
    return chance, 2 * abs(x[k, :, best].mean()), seen.names[best % len(seen.names)]


def mirror_doubt(seen, axis, odd):
    """The same of a mirror image of an axis ("": of none) in which channels `odd` change sign.

    Of what it turns round, either sign must be as frequent.
    """
    a, turn = axis or next(iter(seen.profiles)), -1 if axis else 1
    sign = np.array([-1.0 if name in odd else 1.0 for name in seen.names])
    p, turned = seen.scaled(a), np.array([1, turn, turn, 1])[:, None, None]
    change = p - np.stack([sign, sign**2, sign**2])[..., None] * p[..., ::turn]
    modes = np.fft.rfft(change, norm="forward")[..., :MODES // 4]  # (n, 3, C, K)
    modes = np.concatenate([modes, 0 * modes[:, :1]], 1)  # products have a fourth row
    turns = np.column_stack([np.outer(sign, sign), sign]) * turned < 0  # (3, C, C + 1)
    unit = np.column_stack([np.outer(seen.size, seen.size), seen.size**3])
    x = np.concatenate([modes.real, modes.imag, seen.products[a] / unit * turns], -1)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(COPIES + 1, len(x)))
    signs[0] = 1
    chance, (_, best), most = _stands_out(x.reshape(1, len(x), -1), signs)
    return chance, math.sqrt(most / len(x)), seen.names[best // x.shape[-1] % len(sign)]


def _stands_out(x, turns):
    """How often copies of x (K, n, J), made by turns (R, n), have as large a statistic as any of
    the data, which are the first copy; the index of that, and its value."""
    floor = 1e-6 * x.shape[1]  # averages below a thousandth of the spread say nothing
    values = abs(turns @ x)**2 / (np.square(abs(x)).sum(1, keepdims=True) + floor)  # (K, R, J)
    most, of_data = values.max((0, 2)), values[:, 0]
    chance = (most >= most[0] * (1 - 1e-9)).mean() if most[0] >= 0.1 else 1.0
    return float(chance), np.unravel_index(of_data.argmax(), of_data.shape), most[0]


def nonlinear(u):
    """Share of a step of u (n, T, C, *grid) that no linear map of each wave gives."""
    n, frames, channels = u.shape[:3]
    if n < LEAST or n * (frames - 1) < 8 * channels:
        return 0.0
    waves = np.fft.fftn(u, axes=range(3, u.ndim)).reshape(n, frames, channels, -1)
    strong = np.argsort(-np.square(abs(waves)).sum((0, 1, 2)))[:256]
    waves = np.moveaxis(waves[..., strong], -1, 0)  # (K, n, T, C)
    a, b = (x.reshape(len(strong), -1, channels) for x in (waves[:, :, :-1], waves[:, :, 1:]))
    rest = b - a @ (np.linalg.pinv(a, rcond=1e-6) @ b)
    return float(np.linalg.norm(rest) / (np.linalg.norm(b - a) + 1e-30))


def check_said(fields):
    """Refuse facts that the data contradict, each with its number."""
    if found := " ".join(contradictions(fields)):
        raise UsageError(f"{fields.files[0].path}: {found} Correct that in the file or by "
                         "--facts, or --tasks where that says it.")


def contradictions(fields):
    """Yield a sentence for every fact that the data contradict."""
    facts, look = fields.facts, fields.look
    for name, moved in zip(facts.channels, look.seen.drift(), strict=True):
        if name in facts.conserved and moved > MOVES:
            yield (f"The mean of {name} is said to be conserved, but moves by {moved:.2g} of its "
                   "rms.")
    for one in filter(None, (look.seen, look.given)):
        for name, low, high in zip(one.names, one.low.min(0), one.high.max(0), strict=True):
            if name in facts.positive and low < -1e-5 * abs(high):
                yield f"{name} is said to be positive, but falls to {low:.3g}."
    for axis, circle, jump in zip(facts.axes, facts.periodic, look.seams, strict=True):
        if circle and jump == math.inf:
            yield f"Axis {axis} is periodic, and its last point repeats the first; leave it out."
        elif circle and jump > 1.5 * SEAM:
            yield (f"Axis {axis} is said to be periodic, but the jump across its ends is "
                   f"{jump:.2g} times those inside.")
    moves = [(f"A shift along {axis}", partial(shift_doubt, axis=axis)) for axis in facts.shifts]
    moves += [(f"The {_mirror(axis, odd)}", partial(mirror_doubt, axis=axis, odd=odd))
              for axis, odd in facts.mirrors]
    for move, doubt in moves:
        chance, share, name = doubt(look.seen)
        if chance <= REFUSED and share > 0.05 and not (
                look.given and doubt(look.given)[0] <= UNLIKELY):  # inputs move along
            yield (f"{move} is said to give solutions, but averages of {name} over "
                   f"{len(look.rows)} trajectories contradict it by {100 * share:.2g} % of their "
                   "spread.")
    if facts.linear and facts.shifts == facts.axes and not facts.inputs:
        some = look.rows[:16]
        same = (fields.params(some) == fields.params(some[:1])).all(1).numpy()
        if (rest := nonlinear(look.fields.read(some[same], look.frames).numpy())) > 0.2:
            yield (f"The equation is said to be linear, but {100 * rest:.0f} % of a step is no "
                   "linear map of the field.")


def proposals(fields):
    """Yield what the data support and nobody said: questions for who knows the equation."""
    facts, look, seen = fields.facts, fields.look, fields.look.seen
    for name, moved in zip(facts.channels, seen.drift(), strict=True):
        if name not in facts.conserved and moved < 1e-5 and not facts.steady:
            yield f"the mean of {name} is constant to {moved:.1g}: add conserved = {name}?"
    if len(look.rows) < 4 * LEAST or facts.inputs:
        return
    signs = [odd for n in range(3) for odd in itertools.combinations(facts.channels, n)]
    for axis in sorted({*facts.axes, ""} - {axis for axis, _ in facts.mirrors}):
        for odd in signs:
            chance, share, _ = mirror_doubt(seen, axis, odd)
            if chance > 0.1 and share:
                yield f"{_mirror(axis, odd)} is not contradicted: add it to mirrors?"
                break


def uses(facts):
    """One line of what training makes of the facts."""
    said = [f"shifts along {' and '.join(facts.shifts)}"] if facts.shifts else []
    said += [_mirror(axis, odd) for axis, odd in facts.mirrors]
    said += ["sums of solutions"] if facts.linear and facts.shifts else []
    said += [f"mean of {' and '.join(facts.conserved)} kept"] if facts.conserved else []
    return "; ".join(said) or "no symmetry, nothing conserved"


def shiftable(fields, axes):
    """Those of `axes` along which no average over trajectories depends on the place.

    Inputs shift along, so theirs may.
    """
    look = fields.look
    return tuple(axis for axis in axes if len(look.rows) >= LEAST and
                 shift_doubt(look.seen, axis)[0] > UNLIKELY)


def _mirror(axis, odd):
    signs = " and ".join(f"{name} -> -{name}" for name in odd)
    return (f"mirror of {axis}" + (f" with {signs}" if odd else "")) if axis else signs
