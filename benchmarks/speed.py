"""Error against cost: what a trajectory takes by the solver, the baselines and the operator.

    python -m benchmarks.speed --task burgers1d                  # after benchmarks.accuracy
    python -m benchmarks.speed --task burgers1d --run runs/NAME  # with that run's correctors

A trajectory is the way from the first frame to the last one, which alone is decoded: the operator
stays in latent space between. Seconds are the best of some repeats, for a batch of 1 (latency) and
a large one (throughput); on CUDA every model is compiled and its whole roll-out is one graph, and
the solver replays a graph of its step. The error is the nRMSE of the last frame over the test
split. The solver is also run on every second and fourth grid point, for that is the cheap
alternative that a surrogate must beat; its own error is against the stored solution, interpolated.
The operator is the best by validation of the results of benchmarks.accuracy, unless --run names
another, with its diffusion and consistency stages if it has them; so are FNO and U-Net, of those
trained on the same data.
"""

import dataclasses
import time
from pathlib import Path

import torch

from benchmarks.baselines import conditions, load_baseline
from ups.config import UsageError, command, parse
from ups.data.find import open_fields
from ups.data.pdebench import TASKS
from ups.data.solvers import SOLVERS
from ups.eval.ensemble import corrected, member_noise
from ups.eval.metrics import NRMSE, nrmse
from ups.eval.plots import picture
from ups.files import read_json, write_json
from ups.models.any_point import interpolate
from ups.models.precision import products
from ups.simulator import Simulator
from ups.stages import finished, load_corrector
from ups.train.ranks import now
from ups.train.step import Captured


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = "burgers1d"
    results: str = "benchmarks/results"  # of benchmarks.accuracy
    run: str = ""                # a run with an operator; empty: the stored one
    batches: tuple[int, ...] = (1, 256)
    members: int = 8             # drawn by a corrector; its prediction is their mean
    repeats: int = 5             # the best counts

    def __post_init__(self):
        if self.task not in SOLVERS or TASKS[self.task].layout == "steady":
            fits = [task for task in SOLVERS if TASKS[task].layout != "steady"]
            raise UsageError(f"--task {self.task}: it is one of {', '.join(fits)}.")
        if min(self.batches) < 1 or self.members < 1 or self.repeats < 1:
            raise UsageError("--batches, --members and --repeats are at least 1.")


def stored(cfg, kind, data=None):
    """The folder of the best result of a kind of model by validation, on these data; or None."""
    found = [(min(score for _, score in result["curve"]), path.parent, result)
             for path in Path(cfg.results).glob(f"{cfg.task}_{kind}_*/result.json")
             if (result := read_json(path))
             and (data is None or Path(result["folder"]) == Path(data).resolve())]
    if not found:
        return None
    _, folder, result = min(found, key=lambda one: one[0])
    print(f"{kind}: {folder}, {result['seconds']:g} s of training, seed {result['seed']}")
    return folder


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


def by_operator(sim, task, steps, corrector=None, members=1):
    """Encode, step in latent space, decode the last frame; the mean of `members` draws."""
    latents, model = sim.tasks[task], sim.operator.model
    index = list(sim.tasks).index(task)

    def roll(u, cond):
        z, dt = latents.encode(u), 10.0 ** cond[:, 0]
        cond = torch.nn.functional.pad(cond[:, 1:], (0, latents.params - cond.shape[1] + 1))
        if corrector is None:
            for _ in range(steps):
                z = model(z, dt, cond, index)
            return latents.decode(z)
        how = corrector.settings
        if len(u) not in noises:
            noises[len(u)] = member_noise(0, range(len(u)), members, 2, *z.shape[1:]).to(z)
        (_, drawn), = corrected(model, corrector.model, z, steps, dt, cond, index, noises[len(u)],
                                how.calls, how.correct_every, [steps])
        return latents.decode(drawn).mean(1)

    noises = {}  # by batch size, made before a graph is captured
    return roll


def timed(function, u, cond, graph, repeats):
    """The last frame, and the seconds that it takes (best of some)."""
    def call():
        return function(u, cond)

    call = Captured(call, graph)
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda, own = device.type == "cuda", None if cfg.run else stored(cfg, "operator")
    if not cfg.run and own is None:
        raise UsageError(f"{cfg.results} has no operator for {cfg.task}; run `python -m "
                         f"benchmarks.accuracy --task {cfg.task}` first, or give --run.")
    sim = Simulator.load(cfg.run or own / "run", device)
    if cfg.task not in sim.tasks:
        raise UsageError(f"{sim.run} knows {', '.join(sim.tasks)}, not {cfg.task}.")
    settings = sim.operator.settings
    fields = open_fields(next(t for t in settings.tasks if t.split(":")[0] == cfg.task),
                         settings.data, settings.stride_x, settings.stride_t)
    if len(fields.values) > 1:
        raise UsageError(f"{sim.run} knows several {' and '.join(fields.facts.params)}, of which "
                         "the solver would take one; give a run with files of one value.")
    chosen, steps = fields.split("test"), fields.facts.frames - 1
    truth = fields.read(chosen, slice(-1, None)).to(device)
    first, cond = fields.read(chosen, slice(1))[:, 0].to(device), conditions(fields, chosen, device)

    models = {f"solver, 1/{k} of the points" if k > 1 else "solver": by_solver(cfg.task, fields, k)
              for k in (1, 2, 4) if all(n % k == 0 and n // k >= 16 for n in fields.facts.grid)}
    parts = {}
    for name in ("fno", "unet"):
        if folder := stored(cfg, name, settings.data):
            parts[name] = load_baseline(folder, device)
            models[name] = by_baseline(parts[name], steps)
    parts["operator"] = sim.operator.model
    models["operator"] = by_operator(sim, cfg.task, steps)
    for stage in finished(sim.run):
        corrector = load_corrector(sim.run, stage, sim.operator)
        parts[stage] = corrector.model.to(device).net
        models[f"operator + {stage}, mean of {cfg.members}"] = by_operator(
            sim, cfg.task, steps, corrector, cfg.members)
    if cuda:
        for part in parts.values():
            part.compile(dynamic=False)

    rows = {}
    for name, function in models.items():
        graph = cuda and not name.startswith("solver")  # which captures its own step
        row = rows[name] = {"seconds": {}}
        for batch in sorted(cfg.batches):
            fill = torch.arange(batch, device=device) % len(chosen)
            last, row["seconds"][batch] = timed(function, first[fill], cond[fill], graph,
                                                cfg.repeats)
        used = min(len(chosen), max(cfg.batches))
        row["nrmse"] = nrmse(last[:used, None], truth[:used]).mean().item()
    where = torch.cuda.get_device_name() if cuda else f"CPU, threads: {torch.get_num_threads()}"
    title = f"{cfg.task}, {steps} steps to the last frame, {where}, {time.strftime('%Y-%m-%d')}"
    report(cfg, title, rows, used)


def report(cfg, title, rows, used):
    small, large = min(cfg.batches), max(cfg.batches)
    width = max(map(len, rows))
    print(f"\n{title}; nRMSE of the last frame, {used} test trajectories\n{'':{width}} "
          f"{f's, batch {small}':>12} {f's, batch {large}':>13} {'per second':>12} {'nRMSE':>9}")
    for name, row in rows.items():
        one, many = row["seconds"][small], row["seconds"][large]
        print(f"{name:{width}} {one:12.2e} {many:13.2e} {large / many:12,.0f} {row['nrmse']:9.2e}")
    print(NRMSE + ".")
    out = Path(cfg.results)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{cfg.task}_speed.json", {"title": title, "rows": rows})
    picture(out / f"{cfg.task}_speed.png", draw, title, rows, small, large)


def draw(figure, title, rows, small, large):
    """Error against seconds per trajectory, alone (hollow) and in a large batch (filled)."""
    figure.set_size_inches(7.5, 5)
    axis = figure.subplots()
    floor = min([row["nrmse"] for row in rows.values() if row["nrmse"] > 1e-5] or [1e-5]) / 3
    for i, (name, row) in enumerate(rows.items()):
        x = row["seconds"][large] / large, row["seconds"][small] / small
        y = max(row["nrmse"], floor)  # the solver itself has next to none
        axis.plot(x, (y, y), color=f"C{i}", lw=1.2)
        axis.plot(x[0], y, "o", color=f"C{i}", ms=8)
        axis.plot(x[1], y, "o", color=f"C{i}", ms=8, mfc="white")
        label = name if y == row["nrmse"] else f"{name} (error {row['nrmse']:.0g})"
        axis.annotate(label, (x[1], y), xytext=(8, 0), va="center", textcoords="offset points",
                      fontsize=9, color=f"C{i}")
    axis.set(xscale="log", yscale="log", ylabel="nRMSE of the last frame",
             xlabel=f"seconds per trajectory: batch of {large} (filled), of {small} (hollow)")
    axis.grid(alpha=0.3, which="both", lw=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(0.35, 0.12)
    axis.set_title(title, fontsize=10)


if __name__ == "__main__":
    command(main)
