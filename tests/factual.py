"""Facts of data sets that exist in tests alone."""

from ups.data.facts import Facts, Scale

CIRCLE, WALLS = (True, True, True), (False, False, False)  # boundaries of a token grid


def facts(name="toy", grid=(8,), channels=("u",), frames=6, dt=0.1, params=(), **more):
    """A periodic box; parameters are handed on as they are."""
    axes = ("x", "y", "z")[:len(grid)]
    values = {"boundary": ("periodic",) * len(grid), "domain": ((0.0, 1.0),) * len(grid),
              "scales": tuple(Scale(False, 0.0, 1.0, 0.0, 1.0) for _ in params),
              "shifts": axes} | more
    return Facts(name=name, channels=channels, axes=axes, grid=grid, dt=dt, frames=frames,
                 params=params, **values)
