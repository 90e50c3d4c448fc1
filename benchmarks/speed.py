"""Error against cost: what a trajectory takes by the solver, the baselines and the operator.

    python -m benchmarks.speed --task burgers1d                  # after benchmarks.accuracy

A trajectory is the way from the first frame to the last one, which alone is decoded: the operator
stays in latent space between. Seconds are the best of some repeats, for a batch of 1 (latency) and
a large one (throughput). On CUDA every model is compiled and its whole roll-out is one graph; the
solver replays a graph of its step. The error is the nRMSE of the last frame over the test split.
The solver also runs on every second and fourth grid point, the cheap alternative that a surrogate
must beat; its error is against the stored solution, interpolated. The models are the best by
validation of benchmarks.accuracy: the operator, and those trained on the same data.
"""

import dataclasses
from pathlib import Path

import torch

from benchmarks.baselines import conditions, load_baseline
from benchmarks.tables import device_name, heading, row
from ups.config import UsageError, check, command, parse
from ups.data.find import open_fields
from ups.data.solvers import SOLVERS
from ups.eval.metrics import NRMSE, nrmse
from ups.files import read_json
from ups.models.any_point import interpolate
from ups.models.precision import products
from ups.simulator import Simulator
from ups.train.ranks import now
from ups.train.step import CudaGraphed


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = "burgers1d"
    results: str = "benchmarks/results"  # of benchmarks.accuracy
    batch: int = 256             # trajectories of the large batch
    repeats: int = 5             # the best counts

    def __post_init__(self):
        check(self, batch=(1, 2**20), repeats=(1, 10**6))
        fits = [task for task in SOLVERS if "frames" in SOLVERS[task].PRESETS["small"]]
        if self.task not in fits:
            raise UsageError(f"--task {self.task}: it is one of {', '.join(fits)}.")


def stored(cfg, kind, data=None):
    """The best result of a kind of model by validation, on these data; None if there is none."""
    found = []
    for path in Path(cfg.results).glob(f"{cfg.task}_{kind}_*/result.json"):
        result = read_json(path)
        if data in (None, result["folder"]):
            found.append((min(score for _, score in result["curve"]), path.parent, result))
    if not found:
        return None
    _, folder, result = min(found, key=lambda one: one[0])
    print(f"{kind}: {folder}, {result['seconds']:g} s of training, seed {result['seed']}")
    return folder, result["folder"]


# ---- each model as a function of (u0, cond) -> last frame


def by_solver(task, fields, coarse):
    """The solver on every `coarse`-th point of each axis, read at the points of the data."""
    solver, spec = SOLVERS[task], fields.facts
    params = dict(zip(spec.params, fields.params(torch.tensor([0]))[0].tolist(), strict=True))
    end, axes = spec.dt * (spec.frames - 1), len(spec.grid)
    nodes = task == "ns2d"  # its values stand at i / n, all others in cell centres
    offset = 0.0 if nodes else 0.5
    points = torch.cartesian_prod(*[(torch.arange(n) + offset) / n for n in spec.grid])
    points = points.reshape(-1, axes)

    def solve(u, _):
        if coarse > 1 and nodes:
            u = u[(..., *[slice(None, None, coarse)] * axes)]
        elif coarse > 1:  # a finite volume holds the mean of its cells
            for axis in range(axes):
                u = u.unflatten(2 + axis, (-1, coarse)).mean(3 + axis)
        u = solver.solve(u.contiguous(), end, 2, **params)[:, -1]
        if coarse == 1:
            return u
        u = interpolate(u, points.to(u.device), spec.periodic, offset, fourier=nodes)
        return u.mT.unflatten(2, spec.grid)

    return solve


def by_baseline(model, steps):
    def roll(u, cond):
        for _ in range(steps):
            u = model(u, cond)
        return u
    return roll


def by_operator(sim, task, steps):
    """Encode, step in latent space, decode the last frame."""
    latents, model = sim.tasks[task], sim.operator.model

    def roll(u, cond):
        z, dt = latents.encode(u), 10.0 ** cond[:, 0]
        for _ in range(steps):
            z = model(z, dt, cond[:, 1:])
        return latents.decode(z)

    return roll


def timed(function, u, cond, graph, repeats):
    """The last frame, and the seconds that it takes (best of some)."""
    call = CudaGraphed(lambda: function(u, cond), graph)
    for _ in range(4 if graph else 1):
        last = call()
    seconds = []
    for _ in range(repeats):
        begin = now()
        call()
        seconds.append(now() - begin)
    return last, min(seconds)


@products("highest")  # as benchmarks.accuracy rolls out
def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    own = stored(cfg, "operator")
    if own is None:
        raise UsageError(f"{cfg.results} has no operator for {cfg.task}; run `python -m "
                         f"benchmarks.accuracy --task {cfg.task}` first.")
    folder, data = own
    sim, fields = Simulator.load(folder / "run", device), open_fields(cfg.task, data)
    chosen, steps = fields.split("test"), fields.facts.frames - 1
    truth = fields.read(chosen, slice(-1, None)).to(device)
    first, cond = fields.read(chosen, slice(1))[:, 0].to(device), conditions(fields, chosen, device)

    models = {f"solver, 1/{k} of the points" if k > 1 else "solver": by_solver(cfg.task, fields, k)
              for k in (1, 2, 4) if all(n % k == 0 and n // k >= 16 for n in fields.facts.grid)}
    nets = [sim.operator.model]
    for kind in ("fno", "unet"):
        if found := stored(cfg, kind, data):
            nets.append(load_baseline(found[0], device))
            models[kind] = by_baseline(nets[-1], steps)
    models["operator"] = by_operator(sim, cfg.task, steps)
    if cuda:
        for net in nets:
            net.compile(dynamic=False)

    used = min(len(chosen), cfg.batch)
    heading(f"{cfg.task}, {steps} steps to the last frame, {device_name()}; nRMSE of the last "
            f"frame, {used} test trajectories", "", "s, one", f"s, {cfg.batch}", "per second",
            "nRMSE")
    for name, function in models.items():
        graph, seconds = cuda and not name.startswith("solver"), []  # which captures its own step
        for batch in (1, cfg.batch):
            fill = torch.arange(batch, device=device) % len(chosen)
            last, best = timed(function, first[fill], cond[fill], graph, cfg.repeats)
            seconds.append(best)
        row(name, f"{seconds[0]:.2e}", f"{seconds[1]:.2e}", f"{cfg.batch / seconds[1]:,.0f}",
            f"{nrmse(last[:used, None], truth[:used]).mean():.2e}")
    print(f"\n{NRMSE}.")


if __name__ == "__main__":
    command(main)
