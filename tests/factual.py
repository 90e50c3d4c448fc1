"""Facts of data sets that exist in tests alone."""

import torch

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


def started(model):
    """The model, its zero-initialised weights moved away from zero."""
    for name, weight in model.named_parameters():
        if "modulation" in name or "body.out" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def smooth(count, channels, grid, seed=0, dtype=torch.float64):
    """Random fields whose spectrum falls off, with other means and sizes in each channel."""
    u = torch.randn(count, channels, *grid, dtype=dtype,
                    generator=torch.Generator().manual_seed(seed))
    for axis, n in enumerate(grid):
        decay = (1 + torch.fft.fftfreq(n, 1 / n).abs()) ** -2.0
        shape = [n if a == axis else 1 for a in range(len(grid))]
        u = torch.fft.ifft(torch.fft.fft(u, dim=2 + axis) * decay.view(shape), dim=2 + axis).real
    size = torch.logspace(0, 1, channels, dtype=dtype).view(-1, *[1] * len(grid))
    return size * (u + 0.3)
