"""Statistics of trajectories by which shifts, mirror images and other facts are tested.

That a shift or a mirror image of a solution is a solution is tested by Monte-Carlo (Fisher, 1935).
Where it is true, doing it at random to each of n trajectories changes no statistic of them all. So
those of the data, |sum of x|^2 / sum of |x|^2 of many averages x of a trajectory, must not stand
out among those of `COPIES` such copies.
"""

import math
from dataclasses import dataclass

import numpy as np

COPIES = 1999
LEAST = 8   # trajectories, of which something can be said
MODES = 32  # of profiles along an axis: the longest waves


@dataclass(frozen=True)
class Moments:
    """Averages over each of n trajectories: all that the tests need."""

    names: tuple       # of the channels
    mean: np.ndarray   # (n, T, C) over space
    scale: np.ndarray  # (n, C) standard deviation
    low: np.ndarray    # (n, C)
    high: np.ndarray
    profiles: tuple    # for each axis (n, 3, C, L): u, v^2, (v_t)^2, where v has no mean
    pairs: tuple       # for each axis (n, 3, C, C): v v, v v_x, v_t v_x
    cubes: tuple       # for each axis (n, 3, C): v^3, v_x^3, v v_t v_x

    @property
    def size(self):
        """The standard deviation of each channel in all trajectories (C,)."""
        return np.sqrt(np.square(self.scale).mean(0)) + 1e-30


def moments(names, pieces):
    """Reduce pieces (n, T, C, *grid) of whole trajectories."""
    parts = [_moments(np.asarray(u, np.float64)) for u in pieces]
    return Moments(names, *(
        tuple(map(np.concatenate, zip(*many, strict=True))) if isinstance(many[0], tuple)
        else np.concatenate(many) for many in zip(*parts, strict=True)))


def _moments(u):
    every = (1, *range(3, u.ndim))
    v = u - u.mean(every, keepdims=True)
    change = np.diff(u, axis=1) if u.shape[1] > 1 else 0 * u
    middle = (v[:, 1:] + v[:, :-1]) / 2 if u.shape[1] > 1 else v
    profiles, pairs, cubes = [], [], []
    for axis in every[1:]:
        rest = tuple(sorted({*every} - {axis}))
        profiles.append(np.stack([x.mean(rest) for x in (u, v * v, change * change)], 1))
        w, w_t = (np.moveaxis(x, axis, -1) for x in (middle, change))
        w, w_t, w_x = w[..., 1:-1], w_t[..., 1:-1], (w[..., 2:] - w[..., :-2]) / 2
        pairs.append(np.stack([_products(w, w), _products(w, w_x), _products(w_t, w_x)], 1))
        cubes.append(np.stack([x.mean(every) for x in
                               (w * w * w, w_x * w_x * w_x, w * w_t * w_x)], 1))
    return (u.mean(every[1:]), v.std(every), u.min(every), u.max(every), tuple(profiles),
            tuple(pairs), tuple(cubes))


def _products(a, b):
    """Means over time and space of all products of channels: (n, C, C)."""
    a, b = (x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1) for x in (a, b))
    return a @ b.swapaxes(1, 2) / max(a.shape[-1], 1)


def shift_doubt(seen, axis):
    """(probability of chance, by which share averages vary along an axis, of which channel)."""
    p = seen.profiles[axis]  # (n, F, C, L)
    size = np.stack([seen.size, seen.size**2, p[:, 2].mean((0, 2)) + 1e-30])[..., None]
    modes = np.fft.rfft(p / size, norm="forward")[..., 1:MODES + 1]
    k = np.arange(1, modes.shape[-1] + 1)[:, None, None]
    moves = np.random.default_rng(0).integers(p.shape[-1], size=(COPIES + 1, len(p)))
    moves[0] = 0  # the data themselves
    x = modes.transpose(3, 0, 1, 2).reshape(len(k), len(p), -1)
    values = _alike(x, np.exp(-2j * np.pi / p.shape[-1] * k * moves))  # (K, R, F * C)
    chance, best = _stands_out(values.swapaxes(0, 1).reshape(len(moves), -1))
    k, f, c = np.unravel_index(best, (len(k), *p.shape[1:3]))
    return chance, 2 * abs(modes[:, f, c, k].mean()), seen.names[c]


def mirror_doubt(seen, axis, odd):
    """The same of a mirror image of an axis (None: of none) in which channels `odd` change sign.

    Of what it turns round, either sign must be as frequent.
    """
    a, turn = axis or 0, 1 if axis is None else -1
    sign = np.array([-1.0 if name in odd else 1.0 for name in seen.names])
    p, found = seen.profiles[a], []
    for f, signs, unit in ((0, sign, seen.size), (1, sign**2, seen.size**2),
                           (2, sign**2, p[:, 2].mean((0, 2)) + 1e-30)):
        change = (p[:, f] - signs[:, None] * p[:, f, :, ::turn]) / unit[:, None]
        modes = np.fft.rfft(change, norm="forward")[..., :MODES // 4]
        found += [(part[:, c], c) for part in (modes.real, modes.imag) for c in range(len(sign))]
    slope = np.sqrt(np.diagonal(seen.pairs[a][:, 0], axis1=1, axis2=2).mean(0)) + 1e-30
    for k, turned in enumerate((1, turn, turn)):
        for c, d in np.argwhere(np.outer(sign, sign) * turned < 0):
            found.append((seen.pairs[a][:, k, c, d, None] / (slope[c] * slope[d]), c))
        for c in np.flatnonzero(sign * turned < 0):
            found.append((seen.cubes[a][:, k, c, None] / slope[c]**3, c))
    x = np.concatenate([part for part, _ in found], 1)
    owners = np.concatenate([[c] * part.shape[1] for part, c in found])
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(COPIES + 1, len(x)))
    signs[0] = 1
    chance, best = _stands_out(values := _alike(x, signs))
    return chance, math.sqrt(values[0, best] / len(x)), seen.names[owners[best]]


def _alike(x, turns):
    """|sum of x|^2 / sum of |x|^2 over n trajectories of x (n, J), for each of `turns` (R, n)."""
    floor = 1e-6 * len(x)  # averages below a thousandth of the spread say nothing
    return abs(turns @ x)**2 / (np.square(abs(x)).sum(-2, keepdims=True) + floor)


def _stands_out(values):
    """How often a copy has a statistic as large as any in the first row, and which that is."""
    most = values.max(1)
    rounding = most[0] < 0.1
    return float(rounding or (most >= most[0] * (1 - 1e-9)).mean()), int(values[0].argmax())


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


def divergence(u, spacing):
    """Rms of the divergence of a vector u (n, T, axes, *grid) over that of its gradient."""
    inside = (..., *[slice(1, -1)] * len(spacing))
    slopes = [np.gradient(u[:, :, k], *spacing, axis=range(2, u.ndim - 1))
              for k in range(len(spacing))]
    slopes = [[one[inside] for one in np.reshape(of, (-1, *u[:, :, 0].shape))] for of in slopes]
    total = sum(of[k] for k, of in enumerate(slopes))
    square = sum(np.square(one).mean() for of in slopes for one in of)
    return float(np.sqrt(np.square(total).mean() / (square + 1e-30)))
