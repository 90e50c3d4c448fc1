"""Navier-Stokes at a viscosity of 1e-5 as by Li et al. (2021): ten frames given, ten predicted.

    python -m benchmarks.fno_ns                    # one GPU, about eight minutes

    w_t + u . grad w = 1e-5 lap w + 0.1 (sin 2 pi (x + y) + cos 2 pi (x + y))    on the unit square

from a Gaussian random vorticity with covariance 7^3 (-lap + 49)^(-5/2), solved on 256 x 256 points
by the steps of ups/data/solvers/ns2d.py, kept on 64 x 64 at t = 1, 2, .. 20. 850 trajectories
train, 150 validate, 200 test. So the data have the published distribution; they are not the
published file. The step keeps (|u| + |v|) kmax dt below 2, with the largest speed of a few
trajectories that are solved first; how much half the step changes them is printed.

The operator is trained by `train_operator.py` with --flags. It sees the last given frame alone, or
with `--flags="--size m --history 4"` the last four.
The error is |prediction - truth| / |truth| over space and the ten frames, the mean over the test
trajectories. Published in one protocol, 2026: full-attention transformer 0.0284, SpectraNet 0.079,
FNO 0.102, Galerkin transformer 0.110, U-Net 0.139, Transolver 0.225, persistence 0.748.
"""

import dataclasses
import math
import shlex
import time
from pathlib import Path

import h5py
import torch

from benchmarks.bench import device_name, heading, row, train_operator
from ups import Simulator
from ups.config import RunError, check, command, parse
from ups.data import write_fields
from ups.data.solvers.ns2d import Modes, stepper
from ups.data.solvers.stepping import march, substeps
from ups.files import read_json
from ups.relative_error import relative_error

NU = 4 * math.pi**2 * 1e-5  # on (0, 2 pi)^2, where the equation is otherwise the same
SPLITS = {"train": 850, "valid": 150, "test": 200}
GIVEN, FRAMES, KEPT = 10, 20, 64
PILOT, MARGIN = 8, 1.2  # trajectories that are solved first; how much faster others may be


@dataclasses.dataclass(frozen=True)
class Config:
    flags: str = "--size m"  # of train_operator.py
    samples: int = 1200      # fewer, to try the command
    grid: int = 256          # points of the solver along an axis
    chunk: int = 200         # trajectories that are solved together
    seed: int = 0            # of the data and the weights
    out: str = "benchmarks/results/fno_ns"  # data and run

    def __post_init__(self):
        check(self, samples=(40, 10**6), grid=(KEPT, 4096), chunk=(1, 10**6), seed=(0, 2**31))


def initial(count, n, generator):
    """Vorticity (count, n, n): independent Fourier modes of the covariance's eigenvalues."""
    k = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)
    root = 7**1.5 * (4 * math.pi**2 * (k[:, None] ** 2 + k**2) + 49) ** -1.25
    root[0, 0] = 0
    noise = torch.randn(2, count, n, n, generator=generator, dtype=torch.float64)
    return torch.fft.ifft2(math.sqrt(2) * n**2 * root * torch.complex(*noise)).real


def solve(w, frames, speed):
    """March the vorticity (B, n, n): values on the grid that is kept (B, frames, 64, 64)."""
    n = w.shape[-1]
    modes = Modes(n, w)
    x = 2 * math.pi / n * torch.arange(n, dtype=torch.float64)
    angle = x[:, None] + x
    source = torch.fft.rfft2(0.1 * (angle.sin() + angle.cos())).to(modes.curl)
    count, dt = substeps(frames - 1, frames, 2 / (n / 3 * speed))
    step = n // KEPT

    def observe(state):
        return torch.fft.irfft2(state, s=(n, n))[:, ::step, ::step]

    state = torch.fft.rfft2(w)
    return march(stepper(modes, dt, NU, 0.0, source), state, observe(state), frames, count, observe)


def fastest(w):
    """The largest |u| + |v| of vorticities (.., n, n), in units of the torus (0, 2 pi)^2."""
    state = torch.fft.rfft2(w.flatten(0, -3))
    return Modes(w.shape[-1], w).velocity(state).abs().sum(1).max().item()


def make(cfg, folder, device):
    """Write the splits below `folder`, in the layout that says what is what."""
    begin, generator = time.perf_counter(), torch.Generator().manual_seed(cfg.seed)
    w0 = initial(cfg.samples, cfg.grid, generator).float()
    first = w0[:PILOT].to(device)
    speed = 2 * fastest(first) + 1
    while not (seen := fastest(solve(first, FRAMES + 1, speed))) <= speed:  # the force drives it on
        speed *= 2
    speed = MARGIN * seen
    once, twice = (solve(first, FRAMES + 1, factor * speed) for factor in (1, 2))
    change = relative_error(once[:, -1], twice[:, -1], 1).mean()
    print(f"half the step changes the last frame of {PILOT} trajectories by {change:.1e}")
    u = torch.cat([solve(part.to(device), FRAMES + 1, speed)[:, 1:].cpu()
                   for part in w0.split(cfg.chunk)])[:, :, None]
    print(f"largest |u| + |v| at the end {fastest(u[:, -1]):.2f}, {speed:.2f} was reckoned with; "
          f"{time.perf_counter() - begin:.0f} s")
    if not u.isfinite().all():
        raise RunError("a solution is not finite.")
    sizes = [max(10, round(n * cfg.samples / 1200)) for n in SPLITS.values()]
    for (name, _), part in zip(SPLITS.items(), u.split([*sizes[:-1], len(u) - sum(sizes[:-1])]),
                               strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_fields(folder / name / "w.h5", part.numpy(), dt=1.0, channels="w", axes="x y",
                     boundary="periodic periodic", shifts="")  # every fourth point: no mean is kept


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = Path(cfg.out).resolve()
    if not (out / "fno_ns" / "test" / "w.h5").exists():
        make(cfg, out / "fno_ns", device)
    run = out / "_".join(["run", *cfg.flags.replace("-", "").split()])
    begin = time.perf_counter()
    train_operator(None, run, out / "fno_ns", cfg.seed, shlex.split(cfg.flags))
    seconds = time.perf_counter() - begin

    with h5py.File(out / "fno_ns" / "test" / "w.h5") as file:
        u = torch.from_numpy(file["w"][:])[:, :, None]
    sim = Simulator.load(run, device)
    heading(f"Navier-Stokes, viscosity 1e-5, {len(u)} test trajectories, {device_name()}: |p - y| "
            f"/ |y| of frames {GIVEN + 1} to {FRAMES}", "model", "parameters", "steps", "s",
            "relative L2", f"frame {GIVEN + 1}", f"frame {FRAMES}")
    truth = u[:, GIVEN:]
    count = sum(p.numel() for p in sim.operator.model.parameters())
    settings = read_json(run / "operator" / "config.json")
    seen = u[:, GIVEN - settings["history"]:GIVEN].clone()
    for name, guess, cells in (
            ("persistence", u[:, GIVEN - 1:GIVEN].expand_as(truth), ("", "", "")),
            (f"operator {cfg.flags}", sim.rollout(seen if seen.shape[1] > 1 else seen[:, 0],
                                                        FRAMES - GIVEN),
             (f"{count:,}", f"{settings['steps']:,}", f"{seconds:.0f}"))):
        row(name, *cells, *(f"{relative_error(guess[:, part], truth[:, part], 1).mean():.4f}"
                            for part in (slice(None), 0, -1)))


if __name__ == "__main__":
    command(main)
