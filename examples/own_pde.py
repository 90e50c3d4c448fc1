"""An own PDE, from solver to picture: Kuramoto-Sivashinsky, u_t + u u_x + u_xx + u_xxxx = 0.

    python -m examples.own_pde                    # about six minutes on two cores

Solves it in numpy, writes data/ks.h5, trains an operator on it, rolls it out from a state that no
training has seen, and draws runs/ks/rollout.png.
"""

import subprocess

import matplotlib.pyplot as plt
import numpy as np

from ups import Simulator
from ups.data import write_fields

LENGTH, POINTS, DT, FRAMES, SUBSTEPS = 64.0, 128, 0.5, 61, 4
X = (np.arange(POINTS) + 0.5) * LENGTH / POINTS


def trajectories(n, seed, spin_up=200):
    """Solve n trajectories (n, T, x) on the attractor, by ETDRK4 (Kassam and Trefethen 2005)."""
    rng, h = np.random.default_rng(seed), DT / SUBSTEPS
    k = 2 * np.pi * np.fft.rfftfreq(POINTS, LENGTH / POINTS)
    z = h * (k**2 - k**4)  # the linear part; its functions are means over a circle around z
    e, half = np.exp(z), np.exp(z / 2)
    r = z[:, None] + np.exp(1j * np.pi * (np.arange(32) + 0.5) / 32)
    q, f1, f2, f3 = (h * phi.mean(1).real for phi in (
        (np.exp(r / 2) - 1) / r,
        (-4 - r + np.exp(r) * (4 - 3 * r + r**2)) / r**3,
        (2 + r + np.exp(r) * (r - 2)) / r**3,
        (-4 - 3 * r - r**2 + np.exp(r) * (4 - r)) / r**3))
    wave = -0.5j * k * (k < 2 / 3 * k[-1])  # without the third that would alias

    def nonlinear(v):
        return wave * np.fft.rfft(np.fft.irfft(v, POINTS) ** 2)

    phases = 2 * np.pi * (rng.integers(1, 6, (n, 3, 1)) * X / LENGTH + rng.random((n, 3, 1)))
    v, out = np.fft.rfft(np.cos(phases).sum(1)), []
    for step in range((spin_up + FRAMES) * SUBSTEPS):
        if step >= spin_up * SUBSTEPS and step % SUBSTEPS == 0:
            out.append(np.fft.irfft(v, POINTS))
        n0 = nonlinear(v)
        n1 = nonlinear(a := half * v + q * n0)
        n2 = nonlinear(half * v + q * n1)
        n3 = nonlinear(half * a + q * (2 * n2 - n0))
        v = e * v + f1 * n0 + 2 * f2 * (n1 + n2) + f3 * n3
    return np.stack(out, 1)


if __name__ == "__main__":
    write_fields("data/ks.h5", trajectories(600, seed=0), t=DT * np.arange(FRAMES), x=X,
                 boundary="periodic", conserved="u", mirrors="x: u", channels="u")
    subprocess.run("accelerate launch train_operator.py --data data/ks.h5 --run runs/ks".split(),
                   check=True)

    truth = trajectories(1, seed=1)
    u = Simulator.load("runs/ks").rollout(truth[:, :1], FRAMES - 1)[:, :, 0]
    error = u - truth[:, 1:]
    nrmse = np.linalg.norm(error[0, -1]) / np.linalg.norm(truth[0, -1])
    print(f"nRMSE of the last frame: {nrmse:.1e}")
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(10, 4), layout="constrained")
    shown = {"truth": truth[0, 1:], "operator": u[0], "100 x error": 100 * error[0]}
    for ax, (title, field) in zip(axes, shown.items(), strict=True):
        ax.imshow(field, aspect="auto", origin="lower", extent=(0, LENGTH, 0, DT * FRAMES),
                  cmap="RdBu_r", vmin=-3, vmax=3)
        ax.set(title=title, xlabel="x")
    axes[0].set_ylabel("t")
    figure.savefig("runs/ks/rollout.png", dpi=150)
