"""Does a roll-out pay?  Solver, coarser solver, U-Net and operator: trajectories per second, error.

    python -m benchmarks.rollout --task swe2d diffreact2d ns2d --seconds 40     # a GPU, 8 minutes
    python -m benchmarks.rollout --task ns2d --data "--grid 256 --nu 1e-3 --samples 100 --frames 21"
    python -m benchmarks.rollout --task burgers1d --run runs/burgers1d --compile  # CPU: a run

Makes the data, trains an operator with `--strides` for some seconds of steps, lets it choose plans
and precision on the validation split, and times the way from the first frame to the last one:
encode, step, decode. Every plan is a row. On CUDA the operator is compiled and a whole roll-out is
one graph; the solver runs in float32 with its largest stable steps and replays a graph of its step.
Seconds are the best of some repeats, for a batch and alone. A U-Net comes last.
Errors are the nRMSE of the last frame over the test split. A picture, error over cost, lies in
--out. "Pays after" counts trajectories: (those of the data, by the solver, and the training) over
what the operator saves with each.
"""

import dataclasses
import functools
import shlex
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator

import train_operator as script
from benchmarks import bench
from benchmarks.accuracy import make_data
from benchmarks.baselines import chosen_for, conditions, train_baseline
from benchmarks.bench import device_name, heading, row, steps_within
from ups.config import check, command, parse
from ups.data.find import open_fields
from ups.data.solvers import SOLVERS
from ups.eval.metrics import NRMSE, nrmse
from ups.eval.plots import draw_costs, picture
from ups.latents import open_tasks
from ups.models.any_point import interpolate
from ups.models.precision import products
from ups.rollout import waves, within
from ups.simulator import Simulator
from ups.train.ranks import now
from ups.train.step import CudaGraphed


@dataclasses.dataclass(frozen=True)
class Config:
    task: tuple[str, ...] = ("swe2d", "diffreact2d", "ns2d")
    seconds: float = 40.0        # of training steps of each operator
    strides: tuple[int, ...] = (1, 2, 4, 8)  # that it learns
    flags: str = "--size s --batch_size 64 --ema 0.999 --noise_end 8e-4"  # other flags
    run: str = ""                # measure this run, and train none
    unet_seconds: float = 20.0   # of training steps of each U-Net; 0: none
    compile: bool = False        # the operator on a CPU too; needs a C++ compiler
    precision: str = ""          # float32, tf32, bfloat16; empty: as validation chose
    preset: str = ""             # of the data; empty: medium on a GPU, small on a CPU
    data: str = ""               # flags of `python -m ups.data make` in place of the benchmark's
    batch: int = 64              # trajectories together
    repeats: int = 5             # the best counts
    out: str = "benchmarks/results/rollout"  # folder of data and runs
    seed: int = 0                # of data and weights

    def __post_init__(self):
        check(self, seconds=(0.1, 1e6), unet_seconds=(0, 1e6), batch=(1, 2**20),
              repeats=(1, 10**6), seed=(0, 2**31))


def train(cfg, task, data, out):
    """An operator, for as many steps as take the seconds; the folder of its run."""
    for name in ("probe", "run"):
        shutil.rmtree(out / name, ignore_errors=True)

    def words(name, steps):
        return [*shlex.split(cfg.flags), *bench.flags(
            steps, 2, run=out / name, data=data, tasks=task, cache=out / "cache",
            strides=cfg.strides, val_trajectories=bench.VAL, seed=cfg.seed)]

    step = bench.step_seconds(script, lambda steps: words("probe", steps), len(cfg.strides))
    bench.run(script, words("run", steps_within(cfg.seconds, step)))
    return out / "run"


def made(cfg, task, out):
    """The folder of the data."""
    if not cfg.data:
        return make_data(task, cfg, out)[0]
    folder = out / "data" / bench.digest([task, cfg.data])
    bench.call(None, "-m", "ups.data", "make", task, "--out", folder, *shlex.split(cfg.data))
    return folder


def measure(cfg, fields, models, rows):
    """Print and add the rows of some models {name: (function, steps)}; the solver's comes first."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = fields.split("test")
    first, truth = (fields.read(chosen, part)[:, 0].to(device)
                    for part in (slice(1), slice(-1, None)))
    cond, used = conditions(fields, chosen, device), min(len(chosen), cfg.batch)
    for name, (function, steps) in models.items():
        seconds = {}
        for batch in (1, cfg.batch):
            fill = torch.arange(batch, device=device) % len(chosen)
            last, seconds[batch] = timed(function, first[fill], cond[fill],
                                         device.type == "cuda" and name == "U-Net", cfg.repeats)
        error = nrmse(last[:used, None], truth[:used, None]).mean().item()
        rate, alone = cfg.batch / seconds[cfg.batch], 1e3 * seconds[1]
        rows[name] = rate, alone, error
        solver = rows["solver"]
        row(name, f"{rate:.0f}", f"{rate / solver[0]:.2f}", f"{alone:.2f}",
            f"{solver[1] / alone:.2f}", f"{error:.2e}",
            f"{1e6 / rate / steps:.1f}" if steps else "")


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
    return lambda u, cond: functools.reduce(lambda u, _: model(u, cond), range(steps), u)


def by_operator(sim, name, longest, frames):
    """As the Simulator rolls out, whole batches at a time."""
    task, index = sim.tasks[name], list(sim.tasks).index(name)

    def roll(u, cond):
        key = index, (frames,), longest, sim.precisions[name], len(u)
        return sim._replay(key, [u, cond[:, 1:], None])[:, -1]

    return roll, len(waves([frames], within(task.plans, longest)))


def timed(function, u, cond, graph, repeats):
    """The last frame, and the seconds that it takes (best of some)."""
    call, seconds = CudaGraphed(lambda: function(u, cond), graph), []
    for _ in range(4 * graph + 1 + repeats):  # the first ones compile and capture
        begin = now()
        last = call()
        seconds.append(now() - begin)
    return last, min(seconds[-repeats:])


@products("highest")
def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    cuda = torch.cuda.is_available()
    if not cfg.preset:
        cfg = dataclasses.replace(cfg, preset="medium" if cuda else "small")
    for task in cfg.task:
        out, rows = Path(cfg.out).resolve() / task, {}
        if not cfg.run:
            data = made(cfg, task, out)
            train(cfg, task, data, out)
            torch.compiler.reset()  # each model would count as one more recompilation
        sim = Simulator.load(cfg.run or out / "run", compile=cuda or cfg.compile,
                             precision=cfg.precision or None)
        fields = open_fields(task, data) if not cfg.run else next(
            one.fields for one in open_tasks(Accelerator(), sim.operator.settings)
            if one.name == task)
        facts, steps = fields.facts, fields.facts.frames - 1
        models = {"solver": (by_solver(task, fields, 1), 0),
                  "solver, 1/2 of the points": (by_solver(task, fields, 2), 0)}
        models |= {f"operator, steps of {n}, {sim.precisions[task]}":
                   by_operator(sim, task, n, steps) for n in sim.tasks[task].plans}
        heading(f"{task}, {' x '.join(map(str, facts.grid))} points, {steps} steps of the data to "
                f"the last frame, {device_name()}, batch of {cfg.batch}", "", "per second",
                "x solver", "alone, ms", "x solver", "nRMSE", "us a step")
        with torch.no_grad():
            measure(cfg, fields, models, rows)
        if cfg.unet_seconds and not cfg.run:
            net, _ = train_baseline({
                "kind": "unet", "flags": chosen_for("unet", task), "task": task, "split": "test",
                "folder": data, "seconds": cfg.unet_seconds, "seed": cfg.seed, "steps": 0})
            with torch.no_grad():
                measure(cfg, fields, {"U-Net": (by_baseline(net, steps), steps)}, rows)
        solver = rows["solver"][0]
        for name, (rate, *_) in rows.items():
            if name.startswith("operator") and rate > solver and not cfg.run:
                count = (len(fields) / solver + cfg.seconds) / (1 / solver - 1 / rate)
                print(f"{name}: pays after {count:,.0f} trajectories")
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        picture(Path(cfg.out) / f"{task}.png", draw_costs, f"{task}, the last frame",
                {name: (1 / rate, error) for name, (rate, _, error) in rows.items()})
    print(f"\n{NRMSE}.")


if __name__ == "__main__":
    command(main)
