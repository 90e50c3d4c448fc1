"""Incompressible Navier-Stokes on the torus (0, 2 pi)^2, Kolmogorov forcing and linear drag.

    w_t + u . grad w = nu lap w - drag w + curl f,    u = (psi_y, -psi_x),  -lap psi = w

f = (amplitude sin(4 y), 0) feeds the flow at wavenumber 4 and the drag takes the energy out at
large scales (the setting of Kochkov et al. 2021). Pseudo-spectral in vorticity: with the 2/3 rule
the quadratic term is free of aliasing, hence conserves energy and enstrophy; in the form of
Basdevant (1983), curl div(u u), it takes four transforms. Time: Runge-Kutta of order 4 with the
linear terms integrated exactly (integrating factor). dt keeps (|u| + |v|) kmax dt below 2, of 2.8
that are stable, for |u| + |v| <= 6. Axes (y, x) at x = 2 pi i / n, channels (u, v), zero mean;
whoever reads a file takes its values to stand at cell centres, so there all is half a cell further.

With stochastic forcing there is no f. After every step dt, white noise in time is added to the
vorticity, with four numbers xi ~ N(0, 1) for each step and row:

    w += sqrt(dt) (xi_1 cos 4 x + xi_2 sin 4 x + xi_3 cos 4 y + xi_4 sin 4 y)

so that the next frame is a distribution, invariant under all shifts. The flow is solved on a grid
twice as fine as the one that is kept, by truncation of its spectrum.
"""

import math

import torch

from .stepping import graphed, march, substeps, threads_for

PARAMS = {"nu": 1e-3}
PRESETS = {
    "small": {"samples": 64, "grid": 64, "frames": 41, "t_end": 4.0, "nu": 1e-2, "chunk": 16},
    "medium": {"samples": 1000, "grid": 128, "frames": 41, "t_end": 10.0, "chunk": 125},
}
AMPLITUDE, DRAG, WAVE = 1.0, 0.1, 4
SPEED = 6.0


class Modes:
    """Real Fourier modes (n, n/2+1) of an n x n grid: k^2, 2/3 mask, curl and its inverse."""

    def __init__(self, n, like):
        ky = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)[:, None]
        kx = torch.arange(n // 2 + 1, dtype=torch.float64)
        keep = (kx < n / 3) & (ky.abs() < n / 3)
        k2 = kx**2 + ky**2
        curl = torch.stack(torch.broadcast_tensors(-ky, kx)) * keep
        stress = torch.stack([kx**2 - ky**2, -kx * ky]) * keep
        self.n, self.k2 = n, k2.to(like)
        # complex from the start: real times complex would be converted at every product
        to = {"device": like.device, "dtype": like.dtype.to_complex()}
        self.curl, self.biot = (1j * curl).to(**to), (-1j * curl / k2.clamp(min=1)).to(**to)
        self.stress = (stress + 0j).to(**to)

    def vorticity(self, u):
        """v_x - u_y of the velocity u (B, 2, n, n): (B, n, n/2+1)."""
        return (self.curl * torch.fft.rfft2(u)).sum(1)

    def velocity(self, w):
        """Velocity (B, 2, n, n) of zero mean with the vorticity w (B, n, n/2+1)."""
        return torch.fft.irfft2(self.biot * w[:, None], s=(self.n, self.n))

    def transport(self, w):
        """-u . grad w = (d_yy - d_xx)(uv) + d_xy(u^2 - v^2), in Fourier space."""
        u, v = self.velocity(w).unbind(1)
        products = torch.stack([u * v, (u - v) * (u + v)], 1)
        return (self.stress * torch.fft.rfft2(products)).sum(1)


def force(grid, device=None, dtype=torch.float32):
    """Body force (2, n, n)."""
    y = 2 * math.pi / grid * torch.arange(grid, dtype=torch.float64)
    f = torch.zeros(2, grid, grid, dtype=torch.float64)
    f[0] = AMPLITUDE * torch.sin(WAVE * y)[:, None]
    return f.to(device=device, dtype=dtype)


def initial(count, grid, generator, dtype=torch.float32):
    """Draw velocities (count, 2, n, n) of rms 1 from a random vorticity in wavenumbers 1 to 8.

    The energy spectrum k^3 exp(-k^2 / 6) peaks at k = 3. From 25 points on, where the 2/3
    rule keeps all of them, the field does not depend on the grid.
    """
    noise = torch.randn(count, 32, 32, generator=generator, dtype=torch.float64)
    k2 = Modes(32, noise).k2
    seed = torch.fft.rfft2(noise) * k2 * torch.exp(-k2 / 12)
    w = seed.new_zeros(count, grid, grid // 2 + 1)
    w[:, :9, :9], w[:, -8:, :9] = seed[:, :9, :9], seed[:, -8:, :9]
    u = Modes(grid, noise).velocity(w)
    return (u / u.square().sum(1).mean((-2, -1)).sqrt()[:, None, None, None]).to(dtype)


def solve(u0, t_end, frames, nu=PARAMS["nu"], amplitude=AMPLITUDE, drag=DRAG):
    """March the velocity u0 (B, 2, n, n): (B, frames, 2, n, n)."""
    n = u0.shape[-1]
    modes = Modes(n, u0)
    speed = max(SPEED, u0.abs().sum(1).max().item())
    count, dt = substeps(t_end, frames, 2 / (n / 3 * speed))
    source = amplitude / AMPLITUDE * modes.vorticity(force(n, u0.device, u0.dtype)[None])
    step = stepper(modes, dt, nu, drag, source)
    return march(step, modes.vorticity(u0), u0, frames, count, observe=modes.velocity)


def stepper(modes, dt, nu, drag, source=0.0):
    """The function w(t) -> w(t + dt)."""
    half = torch.exp(-(nu * modes.k2.double() + drag) * dt / 2).to(modes.curl)
    whole = half**2

    def rate(w):
        return modes.transport(w) + source

    def step(w):
        k1 = rate(w)
        k2 = rate(half * (w + dt / 2 * k1))
        k3 = rate(half * w + dt / 2 * k2)
        k4 = rate(whole * w + dt * half * k3)
        return whole * (w + dt / 6 * k1) + dt / 6 * (2 * half * (k2 + k3) + k4)

    return step


# stochastic forcing

def states(w, frames, interval, generator, nu=PARAMS["nu"], drag=DRAG, same=False):
    """Yield the vorticity (B, n, n/2+1) that follows w after 1 .. frames intervals.

    The noise is drawn by a generator on the CPU, the `same` for all rows or for each its own.
    """
    n = w.shape[1]
    modes = Modes(n, w.real)
    count, dt = substeps(interval, 2, 2 / (n / 3 * SPEED))
    deterministic = stepper(modes, dt, nu, drag)
    waves = math.sqrt(dt) * _waves(n, w)
    kick = w.real.new_zeros(len(w), 4)

    def step(w):
        return deterministic(w) + torch.einsum("bi,ixy->bxy", kick.to(w.dtype), waves)

    if w.is_cuda:
        step, w = graphed(step, w)
    with threads_for(w):
        for _ in range(frames):
            noise = torch.randn(count, 1 if same else len(w), 4, generator=generator)
            for numbers in noise.to(kick):
                kick.copy_(numbers)
                w = step(w)
            yield w.clone()


def _waves(n, like):
    """cos 4 x, sin 4 x, cos 4 y, sin 4 y in Fourier space, (4, n, n/2+1)."""
    x = 2 * math.pi / n * WAVE * torch.arange(n, dtype=torch.float64)
    along = torch.stack([x.cos(), x.sin()])
    waves = torch.cat([along[:, None, :].expand(-1, n, -1), along[:, :, None].expand(-1, -1, n)])
    return torch.fft.rfft2(waves).to(like)


def truncated(w, n):
    """Velocity (B, 2, n, n) on a coarser grid, of the waves below n/2 of the vorticity w."""
    fine = w.shape[1]
    u = Modes(fine, w.real).biot * w[:, None]
    kept = u.new_zeros(len(u), 2, n, n // 2 + 1)
    half = n // 2
    kept[..., :half, :half], kept[..., 1 - half:, :half] = u[..., :half, :half], u[..., 1 - half:,
                                                                                  :half]
    return torch.fft.irfft2(kept, s=(n, n)) * (n / fine) ** 2
