"""Diffusion-reaction of an activator u and an inhibitor v (FitzHugh-Nagumo), no flux at the walls.

    u_t = Du lap u + u - u^3 - k - v,    v_t = Dv lap v + u - v    on (-1, 1)^2

Method of lines: five-point finite volumes (order 2; zero flux is a mirrored ghost cell) and the
classical Runge-Kutta scheme of order 4, whose real stability interval 2.78 bounds dt: the spectrum
reaches 8 D / dx^2 from diffusion and 3 u^2 from the reaction. The start is white noise, one N(0, 1)
per cell, whatever the grid. Axes (y, x), channels (u, v).
"""

import torch
import torch.nn.functional as F

from .stepping import march, substeps

PARAMS = {"Du": 1e-3, "Dv": 5e-3, "k": 5e-3}
PRESETS = {
    "small": {"samples": 96, "grid": 64, "frames": 41, "t_end": 5.0, "chunk": 16},
    "medium": {"samples": 1000, "grid": 64, "frames": 101, "t_end": 5.0, "chunk": 250},
    "pdebench": {"samples": 1000, "grid": 128, "frames": 101, "t_end": 5.0, "chunk": 250},
}
PEAK = 5.5  # bound on |u0|: about one normal number in 3e7 is larger


def initial(count, grid, generator, dtype=torch.float32):
    """Draw white noise (count, 2, grid, grid)."""
    return torch.randn(count, 2, grid, grid, generator=generator, dtype=torch.float64).to(dtype)


def solve(u0, t_end, frames, Du=PARAMS["Du"], Dv=PARAMS["Dv"], k=PARAMS["k"]):
    """March u0 (B, 2, n, n) to `frames` times in [0, t_end]: (B, frames, 2, n, n)."""
    n = u0.shape[-1]
    peak = max(PEAK, u0.abs().max().item())
    count, dt = substeps(t_end, frames, 2.5 / (8 * max(Du, Dv) * (n / 2) ** 2 + 3 * peak**2))
    diffusion = torch.tensor([Du, Dv], dtype=torch.float64).mul(n**2 / 4).to(u0)[:, None, None]

    def rate(w):
        p = F.pad(w, (1, 1, 1, 1), mode="replicate")
        out = p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
        out += p[..., 2:, 1:-1]
        out += p[..., :-2, 1:-1]
        out = torch.sub(out, w, alpha=4).mul_(diffusion)
        u, v = w[:, 0], w[:, 1]
        difference = u - v
        out[:, 0] += difference - u**3 - k
        out[:, 1] += difference
        return out

    def step(w):
        k1 = rate(w)
        k2 = rate(torch.add(w, k1, alpha=dt / 2))
        k3 = rate(torch.add(w, k2, alpha=dt / 2))
        k4 = rate(torch.add(w, k3, alpha=dt))
        return w + (k1 + k4 + 2 * (k2 + k3)) * (dt / 6)

    return march(step, u0, u0, frames, count)
