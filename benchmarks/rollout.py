"""Does a roll-out pay?  Solver, coarser solver, U-Net and operator: trajectories per second, error.

    python -m benchmarks.rollout --task swe2d diffreact2d ns2d --seconds 40     # a GPU, 8 minutes
    python -m benchmarks.rollout --task ns2d --data "--grid 256 --nu 1e-3 --samples 100 --frames 21"
    python -m benchmarks.rollout --task burgers1d --run runs/burgers1d          # CPU: a trained run

Makes the data, trains an operator with `--strides` for some seconds of steps, lets it choose plans
and precision on the validation split, and times the way from the first frame to the last one:
encode, step, decode. Every plan is a row. On CUDA the operator is compiled and a whole roll-out is
one graph; the solver runs in float32 with its largest stable steps and replays a graph of its step.
Seconds are the best of some repeats, for a batch and alone. A U-Net follows where time is left.
Errors are the nRMSE of the last frame over the test split. A picture, error over cost, lies in
--out. "Pays after" counts trajectories: (those of the data, by the solver, and the training) over
what the operator saves with each.
"""

import dataclasses
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import train_operator as script
from benchmarks import scripts
from benchmarks.accuracy import digest, make_data
from benchmarks.baselines import chosen_for, conditions, load_baseline, train_baseline
from benchmarks.budget import VAL, WARMUP, steps_within, trial_steps
from benchmarks.tables import device_name, heading, row
from ups.config import UsageError, check, command, parse
from ups.data.find import open_fields
from ups.data.solvers import SOLVERS
from ups.eval.metrics import NRMSE, nrmse
from ups.eval.plots import picture
from ups.files import write_json
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
    limit: float = 400.0         # seconds after which no U-Net is begun
    precision: str = ""          # float32, tf32, bfloat16; empty: as validation chose
    preset: str = ""             # of the data; empty: medium on a GPU, small on a CPU
    data: str = ""               # flags of `python -m ups.data make` in place of the benchmark's
    batch: int = 64              # trajectories together
    repeats: int = 5             # the best counts
    device: str = ""             # cpu: leave the GPU alone
    profile: bool = False        # where the time of each operator's roll-out goes, 15 lines
    out: str = "benchmarks/results/rollout"  # folder of data and runs
    seed: int = 0                # of data and weights

    def __post_init__(self):
        check(self, seconds=(0.1, 1e6), unet_seconds=(0, 1e6), batch=(1, 2**20),
              repeats=(1, 10**6), seed=(0, 2**31))


def train(cfg, task, data, out):
    """An operator, for as many steps as take the seconds; the folder of its run."""
    cuda = torch.cuda.is_available()
    for name in ("probe", "run"):
        shutil.rmtree(out / name, ignore_errors=True)

    def words(name, steps):
        return [*shlex.split(cfg.flags), *scripts.argv({
            "run": out / name, "data": data, "tasks": task, "cache": out / "cache", "steps": steps,
            "strides": cfg.strides, "eval_every": -(-steps // 2), "save_every": steps,
            "log_every": max(1, steps // 10), "val_trajectories": VAL, "seed": cfg.seed,
            "warmup": max(1, round(WARMUP * steps)), "compile": cuda})]

    few, count = trial_steps(cuda)
    few *= len(cfg.strides)  # each is compiled and captured
    step = 1 / scripts.speed(script, words("probe", few + count), count,
                             validate=lambda *args: {"val/nrmse_rollout": math.inf},
                             test_operator=lambda *args: None)
    scripts.run(script, words("run", steps_within(cfg.seconds, step)))
    return out / "run"


def made(cfg, task, out):
    """The folder of the data."""
    if not cfg.data:
        return make_data(task, cfg, out)[0]
    folder = out / "data" / digest([task, cfg.data])
    done = subprocess.run([sys.executable, "-m", "ups.data", "make", task, "--out", folder,
                           *shlex.split(cfg.data)])
    if done.returncode:
        raise UsageError("the data could not be made; the message above says why.")
    return folder


def measure(cfg, fields, models, cuda):
    """Print and return the rows of some models {name: (function, steps)}."""
    device = torch.device("cuda" if cuda else "cpu")
    chosen = fields.split("test")
    first, truth = (fields.read(chosen, part)[:, 0].to(device)
                    for part in (slice(1), slice(-1, None)))
    cond = conditions(fields, chosen, device)
    used, rows = min(len(chosen), cfg.batch), []
    for name, (function, steps) in models.items():
        seconds = {}
        for batch in (1, cfg.batch):
            fill = torch.arange(batch, device=device) % len(chosen)
            last, seconds[batch] = timed(function, first[fill], cond[fill],
                                         cuda and name == "U-Net", cfg.repeats)
        if cfg.profile and name.startswith("operator"):
            with torch.profiler.profile() as profile:
                function(first[fill], cond[fill])
                now()
            order = f"self_{device.type}_time_total"
            print(profile.key_averages().table(sort_by=order, row_limit=15,
                                               max_name_column_width=60))
        error = nrmse(last[:used, None], truth[:used, None]).mean().item()
        a_step = 1e6 * seconds[cfg.batch] / cfg.batch / steps if steps else math.nan
        rows.append((name, cfg.batch / seconds[cfg.batch], 1e3 * seconds[1], error, a_step))
        show(rows[-1], rows[0])
    return rows


def show(one, solver):
    name, rate, alone, error, a_step = one
    row(name, f"{rate:.0f}", f"{rate / solver[1]:.2f}", f"{alone:.2f}",
        f"{solver[2] / alone:.2f}", f"{error:.2e}", f"{a_step:.1f}")


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


def by_operator(sim, name, longest, frames):
    """As the Simulator rolls out, whole batches at a time."""
    task, index = sim.tasks[name], list(sim.tasks).index(name)

    def roll(u, cond):
        key = index, (frames,), longest, sim.precisions[name], len(u)
        return sim._replay(key, [u, cond[:, 1:], None])[:, -1]

    return roll, len(waves([frames], within(task.plans, longest)))


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


def draw(figure, task, rows):
    """Error over cost."""
    axis = figure.subplots()
    for name, rate, _, error, _ in rows:
        axis.loglog(1 / rate, max(error, 1e-7), "o")
        axis.annotate(name, (1 / rate, max(error, 1e-7)), xytext=(6, 4),
                      textcoords="offset points", fontsize=8)
    axis.set(xlabel="seconds of a trajectory, in a batch", ylabel="nRMSE of the last frame",
             title=task)
    axis.grid(alpha=0.3, which="both", lw=0.5)


@products("highest")
def main(argv=None):
    cfg, begin = parse(Config, argv, __doc__), time.monotonic()
    if cfg.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cuda, tables, folders = torch.cuda.is_available(), {}, {}
    preset = cfg.preset or ("medium" if cuda else "small")

    def title(task, fields):
        facts = fields.facts
        heading(f"{task}, {' x '.join(map(str, facts.grid))} points, {facts.frames - 1} steps of "
                f"the data to the last frame, {device_name()}, batch of {cfg.batch}", "",
                "per second", "x solver", "alone, ms", "x solver", "nRMSE", "us a step")

    for task in cfg.task:
        out = Path(cfg.out).resolve() / task
        if cfg.run:
            sim = Simulator.load(cfg.run, compile=cuda, precision=cfg.precision or None)
            fields = next(one.fields for one in open_tasks(Accelerator(), sim.operator.settings)
                          if one.name == task)
        else:
            data = made(dataclasses.replace(cfg, preset=preset), task, out)
            folders[task] = str(data)
            run = train(cfg, task, data, out)
            torch.compiler.reset()  # each model would count as one more recompilation
            print(f"{task}: trained at {time.monotonic() - begin:.0f} s", flush=True)
            sim = Simulator.load(run, compile=cuda, precision=cfg.precision or None)
            fields = open_fields(task, data)
        facts = fields.facts
        models = {"solver" if k == 1 else f"solver, 1/{k} of the points":
                  (by_solver(task, fields, k), 0) for k in (1, 2)}
        models |= {f"operator, steps of {n}, {sim.precisions[task]}":
                   by_operator(sim, task, n, facts.frames - 1) for n in sim.tasks[task].plans}
        title(task, fields)
        with torch.no_grad():
            tables[task] = fields, measure(cfg, fields, models, cuda)
    for task in folders if cfg.unet_seconds else ():
        if time.monotonic() - begin > cfg.limit:
            print(f"{task}: no time is left for a U-Net.")
            continue
        folder, fields = Path(cfg.out).resolve() / task / "unet", tables[task][0]
        folder.mkdir(parents=True, exist_ok=True)
        cell = {"kind": "unet", "flags": chosen_for("unet", task), "task": task, "split": "test",
                "folder": folders[task], "seconds": cfg.unet_seconds, "seed": cfg.seed,
                "steps": 0}
        train_baseline(cell, folder)
        write_json(folder / "result.json", cell)
        net, steps = load_baseline(folder, "cuda" if cuda else "cpu"), fields.facts.frames - 1
        if cuda:
            net.compile(dynamic=False)
        with torch.no_grad():
            tables[task][1].extend(measure(cfg, fields, {"U-Net": (by_baseline(net, steps), steps)},
                                           cuda))
    print(f"\n--- tables, after {time.monotonic() - begin:.0f} s")
    for task, (fields, rows) in tables.items():
        title(task, fields)
        for one in rows:
            show(one, rows[0])
        pays = {name: (len(fields) / rows[0][1] + cfg.seconds) / (1 / rows[0][1] - 1 / rate)
                for name, rate, *_ in rows if name.startswith("operator") and rate > rows[0][1]
                and not cfg.run}
        print(*(f"{name}: pays after {count:,.0f} trajectories" for name, count in pays.items()),
              sep="\n")
        picture(Path(cfg.out) / f"{task}.png", draw, task, rows)
    print(f"\n{NRMSE}.")


if __name__ == "__main__":
    command(main)
