"""Burgers u_t + (u^2/2)_x = (nu/pi) u_xx, periodic on (0, 1), by second-order finite volumes.

Strang splitting A(dt) D(2 dt) A(dt):
- A, the hyperbolic part: MUSCL-Hancock (van Leer 1984). Limited slopes s, half a step in the cell,
  u_{i+-1/2} = u_i +- s_i (1 -+ lambda u_i) / 2 with lambda = dt/dx, then Godunov's exact flux
  F(a, b) = max(a, -b, 0)^2 / 2, which for Burgers needs no case distinction.
- D, the diffusion: exp(2 dt L) of the three-point Laplacian L, exact in Fourier space, so that nu
  does not limit dt; unlike the spectral one it has a maximum principle and cannot ring at a shock.

Order 2 where u is smooth, conservative. dt has Courant number 0.8 at speed 4, which no sample of
the recipe exceeds (sum of four amplitudes below 1); faster data take smaller steps. Against 1024
points, 128 are off by a mean nRMSE of 0.003 at nu = 0.01, and 256 by 0.008 at nu = 0.001.
"""

import math

import torch
import torch.nn.functional as F

from .initial1d import initial  # noqa: F401  (part of the solver's interface)
from .stepping import march, substeps, van_leer

PARAMS = {"nu": 0.001}
PRESETS = {
    "small": {"samples": 512, "grid": 128, "frames": 41, "t_end": 2.0, "nu": 0.01, "chunk": 128},
    "medium": {"samples": 2000, "grid": 256, "frames": 41, "t_end": 2.0, "chunk": 500},
    "pdebench": {"samples": 10000, "grid": 1024, "frames": 201, "t_end": 2.0, "chunk": 500},
}
SPEED = 4.0  # bound on |u0| of the recipe
COURANT = 0.8


def solve(u0, t_end, frames, nu=PARAMS["nu"]):
    """March u0 (B, 1, n) to `frames` times in [0, t_end]: (B, frames, 1, n)."""
    n = u0.shape[-1]
    speed = max(SPEED, u0.abs().max().item())
    count, dt = substeps(t_end, frames, 2 * COURANT / (n * speed))  # two advections per step
    ratio = dt / 2 * n
    k = torch.arange(n // 2 + 1, dtype=torch.float64)
    laplacian = -((2 * n * torch.sin(math.pi * k / n)) ** 2)
    decay = torch.exp(nu / math.pi * dt * laplacian).to(u0)

    def step(u):
        u = advect(u, ratio)
        u = torch.fft.irfft(torch.fft.rfft(u) * decay, n=n)
        return advect(u, ratio)

    return march(step, u0, u0, frames, count)


def advect(u, ratio):
    """One MUSCL-Hancock step of u_t + (u^2/2)_x = 0 with ratio = dt/dx."""
    u2 = F.pad(u, (2, 2), mode="circular")
    d = u2[..., 1:] - u2[..., :-1]
    u1 = u2[..., 1:-1]  # one ghost cell on each side
    half, drift = van_leer(d[..., :-1], d[..., 1:]).mul_(0.5), u1 * ratio
    right = u1 + half * (1 - drift)
    left = u1 - half * (1 + drift)
    upwind = torch.maximum(right[..., :-1], -left[..., 1:]).clamp_(min=0)
    flux = upwind.square_().mul_(0.5 * ratio)
    return u - (flux[..., 1:] - flux[..., :-1])
