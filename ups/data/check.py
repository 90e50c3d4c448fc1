"""What the data say of themselves: the seam of an axis, and whether places on it are alike."""

from contextlib import suppress

import numpy as np

from ups.config import UsageError

SEAM = 3.0  # a jump across the seam above three times the jumps inside is no periodic field


def seam(file, rows):
    """Rms jump across the ends of each space axis over the rms jump inside, at the last frame.

    About 1 where the axis is periodic, large where the two ends do not know of each other.
    """
    kept = []
    for row in rows:
        with suppress(UsageError):  # one that cannot be read is told by who needs it
            kept.append(file.read([row], range(file.facts.frames - 1, file.facts.frames)))
    if not kept:
        return [0.0] * len(file.facts.grid)
    u = np.concatenate(kept)
    u = u[np.isfinite(u).all(axis=tuple(range(1, u.ndim)))]
    u = u / (u.std(axis=(0, 1, *range(3, u.ndim)), keepdims=True) + 1e-30)
    ratios = []
    for axis in range(3, u.ndim):
        v = np.moveaxis(u, axis, -1)
        inside, across = np.square(np.diff(v)).mean(), np.square(v[..., 0] - v[..., -1]).mean()
        ratios.append(float(np.sqrt(across / (inside + 1e-30))))
    return ratios


def shiftable(fields, indices, axes):
    """Those of `axes` along which neither mean nor variance over trajectories depends on the place.

    Judged against copies of the trajectories that are each moved at random: where the profile of
    the data is among the largest of theirs, places differ.
    """
    if len(indices) < 8:
        return []
    free, random = [], np.random.RandomState(0)
    u = np.concatenate([fields.read([i]).numpy() for i in indices])
    for axis in axes:
        k = 3 + fields.facts.axes.index(axis)
        others = tuple(a for a in range(1, u.ndim) if a not in (2, k))
        profiles = np.stack([u.mean(others), np.square(u).mean(others)], 1)  # (n, 2, C, size)
        profiles = profiles - profiles.mean(-1, keepdims=True)

        def size(shifts, profiles=profiles):
            moved = np.stack([np.roll(p, s, -1) for p, s in zip(profiles, shifts, strict=True)])
            return np.square(moved.mean(0)).mean(-1)

        zero = np.zeros(len(u), int)
        found = size(zero)
        moved = [size(random.randint(0, u.shape[k], len(u))) for _ in range(99)]
        if not (found > np.max(moved, 0) * (1 + 1e-6)).any():
            free.append(axis)
    return free
