"""The random initial condition of the 1-D tasks, on cell centres of (0, 1).

    u0(x) = +-[ |.| with p = 0.1 ] sum_{j=1..4} A_j sin(2 pi j m_j x + phi_j),  A_j ~ U(0, 1)

Two indices j are drawn from {1, 2, 3, 4} with replacement and m_j counts them: a repeated draw
doubles the wavenumber, an index that was not drawn adds a constant. With p = 0.1 the field is cut
to (xL, xR) by a window of two tanh of width 0.01 (Takamoto et al. 2022).
"""

import math

import torch

DRAWS = 15  # numbers per sample: every sample takes as many, whatever it turns out to be


def centres(grid):
    """Cell centres of (0, 1), (grid,) float64."""
    return (torch.arange(grid, dtype=torch.float64) + 0.5) / grid


def draw(count, generator):
    """Draw what defines `count` initial conditions: (count, DRAWS) uniform numbers."""
    return torch.rand(count, DRAWS, generator=generator, dtype=torch.float64)


def evaluate(draws, x):
    """Evaluate the initial conditions at x (n,) in float64, with period 1: (count, 1, n)."""
    x = x.remainder(1.0)
    amplitude, phase = draws[:, :4, None], 2 * math.pi * draws[:, 4:8, None]
    chosen = (4 * draws[:, 8:10]).floor() + 1  # (count, 2) in {1, 2, 3, 4}
    number = torch.arange(1.0, 5.0, dtype=torch.float64)
    wave = number * (chosen[:, :, None] == number).sum(1)  # (count, 4): j m_j
    u = (amplitude * torch.sin(2 * math.pi * wave[:, :, None] * x + phase)).sum(1)  # (count, n)

    absolute, sign, windowed, left, right = draws[:, 10:, None].unbind(1)
    u = torch.where(absolute < 0.1, u.abs(), u)
    u = torch.where(sign < 0.5, u, -u)
    left, right = 0.1 + 0.35 * left, 0.55 + 0.35 * right
    window = 0.5 * (torch.tanh((x - left) / 0.01) - torch.tanh((x - right) / 0.01))
    return torch.where(windowed < 0.1, u * window, u)[:, None]


def initial(count, grid, generator, dtype=torch.float32):
    """Draw u0 (count, 1, grid); the draws do not depend on the grid."""
    return evaluate(draw(count, generator), centres(grid)).to(dtype)
