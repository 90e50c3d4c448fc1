"""Error after the same seconds of training: the operator, an FNO and a U-Net, on the same data.

    python -m benchmarks.accuracy --task burgers1d --seconds 100
    python -m benchmarks.accuracy --task diffreact2d ns2d --models operator unet
    python -m benchmarks.accuracy --models "operator --patch 2" fno "fno --model.width 96"

A model is a name and, in quotes, flags that change it: fields of `train_operator.Config` for the
operator, of `FNORecipe` and `UNetRecipe` below for the baselines. The operator is trained by
`train_operator.main`; the baselines by the plain loop below, with the advantage that their data lie
on the device and a whole training step is one CUDA graph. All have the same schedule of unrolled
steps, noise, averages of the weights and a learning rate that ends at zero when the time is over:
a step is timed first, and the number of steps follows from it.

Every model is a process of its own. They compile at the same time, then one after the other times
its step and trains (a file lock: the second phase starts when no process is left in the first).
Compilation, warm-up and validation are not counted, for none. A result is stored in --out under the
hash of its configuration and never computed twice. The best average by validation is tested once:

    nRMSE for one step from each true frame, and for the roll-out from the first frame alone, with
    95 % bootstrap intervals over the test trajectories, and the ratio operator / best baseline.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.fno import FNO, FNOConfig
from benchmarks.unet import UNet, UNetConfig
from ups.config import UsageError, check, command, flat, parse
from ups.data.fields import open_fields
from ups.data.tasks import TASKS
from ups.eval.metrics import NRMSE, interval, nrmse, resamplings
from ups.train.checkpoint import export_model, load_model
from ups.train.ema import EMA
from ups.train.muon import Muon
from ups.train.policy import PR_SET_PDEATHSIG, write_json
from ups.train.schedule import warmup_cosine
from ups.train.step import Captured
from ups.train.systems import RunConfig

ROOT = Path(__file__).resolve().parent.parent
DATA = {  # what is changed in the preset medium: sizes for minutes of training
    "diffreact2d": {"samples": 500, "frames": 51},
    "swe2d": {"samples": 500, "frames": 51},
    "ns2d": {"samples": 500, "grid": 64, "nu": 0.005},
}
FLAGS = {  # beside the defaults, by model and number of axes
    ("operator", 1): "--batch_size 64 --ema 0.999 --warmup 500",
    ("operator", 2): "--batch_size 32 --ema 0.999 --warmup 500",
    ("fno", 2): "--model.modes 12 --model.width 48",
    ("unet", 1): "--model.width 64",
}
MOMENTS, VAL = 8, 32  # validations during the training, trajectories of each


@dataclasses.dataclass(frozen=True)
class Config:
    task: tuple[str, ...] = ("burgers1d",)  # one or several
    models: tuple[str, ...] = ("operator", "fno", "unet")  # each with its flags, in quotes
    seconds: float = 100.0  # of training steps, for each model
    preset: str = "medium"  # of the data, which are made where missing; small for a CPU
    out: str = "benchmarks/results"  # results by hash, data, logs and pictures
    seed: int = 0

    def __post_init__(self):
        check(self, seconds=(0.1, math.inf))
        for task in self.task:
            if task not in TASKS:
                raise UsageError(f"--task {task}: it is one of {', '.join(TASKS)}.")
        for model in self.models:
            if model.split()[:1] not in (["operator"], *([name] for name in BASELINES)):
                raise UsageError(f"--models {model}: it begins with operator, fno or unet.")


@dataclasses.dataclass(frozen=True)
class Recipe:
    optimizer: str = "muon"  # as the operator's, or adamw
    batch_size: int = 64
    lr: float = 4e-3
    weight_decay: float = 1e-5
    warmup: float = 0.02    # share of the steps
    grad_clip: float = 1.0
    ema: float = 0.999
    unroll: int = 4         # longest, as in train_operator.py
    noise: float = 0.01


@dataclasses.dataclass(frozen=True)
class FNORecipe(Recipe):
    model: FNOConfig = FNOConfig()


@dataclasses.dataclass(frozen=True)
class UNetRecipe(Recipe):
    model: UNetConfig = UNetConfig()


BASELINES = {"fno": (FNO, FNORecipe), "unet": (UNet, UNetRecipe)}


# ---- a baseline: model, errors, training


class Stepper(nn.Module):
    """u (B, C, *grid) -> the next frame, in physical units: normalised, a net for the change.

    What the equation conserves is taken out of the change, as in our operator.
    The net also sees log10 of dt and of the PDE's parameters, and the coordinates where the
    equation depends on the place: x itself in a closed domain, waves along a forced periodic axis.
    """

    def __init__(self, net, config, fields, mean, std):
        super().__init__()
        spec, task = fields.spec, TASKS[fields.spec.task]
        periodic, planes = spec.boundary == "periodic", []
        for axis, n in enumerate(spec.grid):
            x = ((torch.arange(n) + 0.5) / n).view([-1 if a == axis else 1 for a in
                                                    range(len(spec.grid))]).expand(spec.grid)
            if not periodic:
                planes.append(2 * x - 1)
            elif task.axes[axis] in task.forced:
                planes += [wave(2 * math.pi * k * x) for k in (1, 2, 4)
                           for wave in (torch.sin, torch.cos)]
        places = torch.stack(planes) if planes else torch.zeros(0, *spec.grid)
        inputs = len(spec.channels) + len(places) + 1 + len(spec.params)
        self.net = net(config, inputs, len(spec.channels), spec.grid, periodic)
        kept = torch.tensor([float(c in task.conserved) for c in spec.channels])
        kept = kept.view(-1, *[1] * len(spec.grid))
        for name, value in {"places": places, "mean": mean, "std": std, "kept": kept}.items():
            self.register_buffer(name, value)

    def forward(self, u, cond):
        """u (B, C, *grid), cond (B, 1 + P) -> (B, C, *grid)"""
        x = (u - self.mean) / self.std
        grid = (1,) * (u.ndim - 2)
        cond = cond.view(*cond.shape, *grid).expand(*cond.shape, *u.shape[2:])
        places = self.places.expand(len(u), *self.places.shape)
        update = self.net(torch.cat([x, cond, places], 1))
        return u + self.std * (update - self.kept * update.mean(grid_axes(u), keepdim=True))


def grid_axes(u):
    return tuple(range(2, u.ndim))


def conditions(fields, indices, device):
    """log10 of dt and of the parameters, (n, 1 + P)."""
    params = fields.params(indices).abs().clamp(min=1e-12)
    dt = torch.full((len(indices), 1), fields.spec.dt)
    return torch.cat([dt, params], 1).log10().float().to(device)


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def errors(model, fields, indices, device):
    """nRMSE (n, T - 1) of the roll-out from the first frame, and of one step from every frame."""
    rolled, single = [], []
    size = max(1, 2**26 // math.prod((fields.spec.frames, *fields.spec.grid)))
    for part in indices.split(min(64, size)):
        u = fields.read(part).to(device)
        cond, p, frames = conditions(fields, part, device), u[:, 0], []
        for _ in range(u.shape[1] - 1):
            p = model(p, cond)
            frames.append(p)
        rolled.append(nrmse(torch.stack(frames, 1), u[:, 1:]).cpu())
        ones = [model(u[:, t], cond) for t in range(u.shape[1] - 1)]
        single.append(nrmse(torch.stack(ones, 1), u[:, 1:]).cpu())
    return {"rollout": torch.cat(rolled), "one_step": torch.cat(single)}


def unroll_at(step, steps, longest):
    """The schedule of train_operator.py: single steps, then from 70 % on 2, 3, ... steps."""
    ramp = (step / steps - 0.7) / 0.3
    return min(longest, max(1, 2 + math.floor(ramp * (longest - 1))))


def steps_within(seconds, times):
    """How many steps of that schedule take `seconds`, where `times` maps an unroll to its time."""
    later = [times[u] for u in times if u > 1] or [times[1]]
    return max(8, round(seconds / (0.7 * times[1] + 0.3 * sum(later) / len(later))))


class Clock:
    """Seconds of stepping; stands still while something else is done."""

    def __init__(self):
        self.spent, self.since = 0.0, None

    def start(self):
        self.since = now()

    def stop(self):
        self.spent, self.since = self.spent + now() - self.since, None


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train_baseline(cell, folder, alone):
    """Train on data that lie on the device; with CUDA a whole step is one graph."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, recipe = BASELINES[cell["model"].split()[0]]
    cfg = parse(recipe, arguments(cell))
    fields = open_fields(cell["task"], cell["folder"])
    chosen = fields.split("train")
    u, cond = fields.read(chosen).to(device), conditions(fields, chosen, device)
    over = (0, 1, *range(3, u.ndim))
    std, mean = torch.std_mean(u, over, keepdim=True)
    torch.manual_seed(cell["seed"])
    model = Stepper(kind, cfg.model, fields, mean[:, 0].cpu(), std[:, 0].cpu()).to(device)
    if device.type == "cuda":
        model.compile(dynamic=False)
    params = list(model.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)
    lr = torch.tensor(cfg.lr, device=device)
    options = {"weight_decay": cfg.weight_decay, "fused": True, "capturable": True}
    if cfg.optimizer == "muon":
        optimizer = Muon(model, model.net.hidden, lr, **options)
    else:
        optimizer = torch.optim.AdamW(params, lr, **options)
    ema = EMA(model, cfg.ema)
    count, frames = u.shape[:2]
    longest = min(cfg.unroll, frames - 1)

    def loss_of(unroll):
        row = torch.randint(count, (cfg.batch_size,), device=device)
        first = torch.randint(frames - unroll, (cfg.batch_size,), device=device)
        window = [u[row, first + k] for k in range(unroll + 1)]  # (B, C, *grid) each
        level = cfg.noise * torch.rand(cfg.batch_size, *[1] * (u.ndim - 2), device=device)
        draw = torch.randn_like(window[0])
        draw = draw - draw.mean(grid_axes(draw), keepdim=True)
        p, c, loss = window[0] + level * model.std * draw, cond[row], 0.0
        for y in window[1:]:
            p = model(p, c)
            error = ((p - y) / model.std).flatten(1).square().sum(1)
            size = ((y - model.mean) / model.std).flatten(1).square().sum(1)
            loss = loss + (error / size.clamp(min=1e-6) + 1e-12).sqrt().mean()
        return loss / unroll

    def step(unroll):
        torch._foreach_zero_([p.grad for p in params])
        loss = loss_of(unroll)
        loss.backward()
        nn.utils.clip_grad_norm_(params, cfg.grad_clip, foreach=True)
        optimizer.step()
        ema.update(model)
        return loss.detach()

    # compile and capture, then wait for the device and time a step
    step_of = {k: Captured(functools.partial(step, k), device.type == "cuda")
               for k in range(1, longest + 1)}
    start = [p.detach().clone() for p in params]
    for call in step_of.values():
        for _ in range(4 if device.type == "cuda" else 1):
            call()
    alone()
    times, repeats = {}, 100 if device.type == "cuda" else 2
    for k, call in step_of.items():
        begin = now()
        for _ in range(repeats):
            call()
        times[k] = (now() - begin) / repeats
    with torch.no_grad():  # as if nothing had happened
        torch._foreach_copy_(params, start)
        torch._foreach_copy_(ema.shadow, start)
        for state in optimizer.state.values():
            torch._foreach_zero_(list(state.values()))
        ema.updates.zero_()

    steps = steps_within(cell["seconds"], times)
    factor, clock, curve = warmup_cosine(max(1, round(cfg.warmup * steps)), steps), Clock(), []
    moments = {round(steps * (i + 1) / MOMENTS) for i in range(MOMENTS)}
    clock.start()
    for k in range(steps):
        lr.fill_(cfg.lr * factor(k))
        loss = step_of[unroll_at(k, steps, longest)]()
        if k + 1 in moments:
            clock.stop()
            if not math.isfinite(loss):
                raise FloatingPointError(f"{cell['model']}: the loss is {float(loss)} at step {k}.")
            with ema.applied(model):
                score = float(errors(model, fields, fields.split("val")[:VAL], device)
                              ["rollout"].mean())
            ema.keep_best(score)
            curve.append((clock.spent, score))
            print(f"step {k + 1} of {steps}, {clock.spent:.1f} s: roll-out nRMSE {score:.4g} (val)",
                  flush=True)
            clock.start()
    clock.stop()
    with ema.applied(model, best=True):
        tables = errors(model, fields, fields.split("test"), device)
        export_model(folder / "model", model.state_dict(), {"model": cell["model"]})
    return {"parameters": sum(p.numel() for p in params), "batch_size": cfg.batch_size,
            "steps": steps, "train_seconds": clock.spent, "curve": curve,
            "step_ms": {k: 1e3 * t for k, t in times.items()}} | tables


def load_baseline(folder, device="cpu"):
    """The baseline of a stored result, ready to step fields."""
    cell = json.loads((folder / "result.json").read_text())
    kind, recipe = BASELINES[cell["model"].split()[0]]
    fields = open_fields(cell["task"], cell["folder"])
    _, tensors = load_model(folder / "model")
    config = parse(recipe, arguments(cell)).model
    model = Stepper(kind, config, fields, tensors["mean"], tensors["std"])
    model.load_state_dict(tensors)
    return model.eval().requires_grad_(False).to(device)


# ---- the operator, by its own script


@contextlib.contextmanager
def swapped(module, **names):
    """Watch a script from outside: other names in it, for a while."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def train_operator(cell, folder, alone):
    """`train_operator.main` twice: a few steps that compile and are timed, then the training."""
    from accelerate.state import AcceleratorState

    import train_operator as script
    from ups.eval.rollout import measure
    from ups.train.step import Backward

    cuda, clock, curve, marks, result = torch.cuda.is_available(), Clock(), [], [], {}
    few = 100 if cuda else 20

    def warm(backward, batch):
        """Compile and capture every unroll; this only computes gradients, which are overwritten."""
        for unroll in range(1, batch["z"].shape[1]):
            for _ in range(4 if cuda else 1):
                Backward.__call__(backward, batch | {"unroll": unroll})

    class Probed(Backward):
        def __call__(self, batch):
            if batch["step"] == 0:
                warm(self, dict(batch))
                alone()
            if batch["step"] in (0, few // 5) or batch["unroll"] != marks[-1][1]:
                marks.append((batch["step"], batch["unroll"], now()))
            return super().__call__(batch)

    class Clocked(Backward):
        def __call__(self, batch):
            if batch["step"] == 0:
                warm(self, dict(batch))
                clock.start()
            return super().__call__(batch)

    def probe_end(*args):
        marks.append((few, None, now()))
        return {"val/nrmse_rollout": math.inf}

    def evaluate(*args):
        clock.stop()
        scores = real_evaluate(*args)
        curve.append((clock.spent, scores["val/nrmse_rollout"]))
        clock.start()
        return scores

    def finish(run, model, tasks):
        tables = measure(run.accelerator, model, tasks[0], 0, "test")
        result.update(rollout=tables["operator"], one_step=tables["one_step"],
                      parameters=sum(p.numel() for p in model.parameters()))

    def main(name, steps, moments, **names):
        flags = {"run": folder / name, "steps": steps, "eval_every": -(-steps // moments),
                 "save_every": steps, "log_every": max(1, steps // 20), "val_trajectories": VAL,
                 "cache": folder / "cache", "data": cell["folder"], "tasks": cell["task"]}
        argv = [item for key, value in flags.items() for item in (f"--{key}", str(value))]
        with swapped(script, **names):
            script.main([*arguments(cell), *argv, *["--compile"] * cuda])
        AcceleratorState._reset_state(reset_partial_state=True)

    real_evaluate = script.evaluate
    main("probe", few, 1, Backward=Probed, evaluate=probe_end, finish_operator=lambda *args: None)
    times = {unroll: (end - begin) / (last - first) for (first, unroll, begin), (last, _, end)
             in zip(marks, marks[1:], strict=False)}  # a later mark of the same unroll wins
    steps = steps_within(cell["seconds"], times)
    main("run", steps, MOMENTS, Backward=Clocked, evaluate=evaluate, finish_operator=finish)
    return {"steps": steps, "train_seconds": clock.spent, "curve": curve,
            "step_ms": {k: 1e3 * t for k, t in times.items()},
            "batch_size": settings(cell)["batch_size"]} | result


# ---- one cell in a process of its own


def arguments(cell):
    """The flags of a cell: what is set for its model and axes, then what the user has added."""
    name, *more = shlex.split(cell["model"])
    return [*shlex.split(FLAGS.get((name, len(TASKS[cell["task"]].axes)), "")), *more]


def settings(cell):
    """Every field that shapes the result, as plain values."""
    if cell["model"].split()[0] in BASELINES:
        return flat(parse(BASELINES[cell["model"].split()[0]][1], arguments(cell)))
    import train_operator as script

    systems = {field.name for field in dataclasses.fields(RunConfig)}
    fields = flat(parse(script.Config, arguments(cell)))
    systems |= {"tasks", "steps", "val_trajectories"}  # given by the benchmark
    return {key: value for key, value in fields.items() if key not in systems}


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def work(path, lock):
    """Train the model of one cell; `lock` is shared so far, and exclusive from the timing on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # do not outlive the benchmark
    path, begin, waited = Path(path), time.perf_counter(), {}
    cell, folder = json.loads(path.read_text()), path.with_suffix("")

    def alone():
        waited["compile_seconds"] = now() - begin
        print(f"ready after {waited['compile_seconds']:.0f} s", flush=True)
        fcntl.flock(int(lock), fcntl.LOCK_EX)
        waited["at"] = time.strftime("%Y-%m-%d")

    train = train_operator if cell["model"].split()[0] == "operator" else train_baseline
    result = train(cell, folder, alone)
    tables = {name: result.pop(name) for name in ("rollout", "one_step")}
    result |= waited | {name: table.mean(1).tolist() for name, table in tables.items()}
    result["by_lead"] = tables["rollout"].mean(0).tolist()
    write_json(folder / "result.json", cell | result)


# ---- all cells, tables and picture


def make_data(cells):
    """Make the data of every task, all at once."""
    jobs = []
    for task, folder, about in {c["task"]: (c["task"], c["folder"], c["data"])
                                for c in cells}.values():
        flags = [item for key, value in about.items() for item in (f"--{key}", str(value))]
        line = [sys.executable, "-m", "ups.data", "make", task, "--out", folder, *flags]
        jobs.append(subprocess.Popen(line, cwd=ROOT))
    if any([job.wait() for job in jobs]):
        raise UsageError("the data could not be made; the message above says why.")


def launch(cell, folder):
    """Start a process for one cell, which holds the lock shared."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".json")
    write_json(path, cell)
    with open(folder.parent / ".lock", "w") as lock, open(folder / "log.txt", "w") as log:
        fcntl.flock(lock, fcntl.LOCK_SH)
        code = "import sys; from benchmarks.accuracy import work; work(*sys.argv[1:])"
        return subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(lock.fileno())], cwd=ROOT, stdout=log,
            stderr=log, pass_fds=[lock.fileno()],
            env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4", "PYTHONPATH": str(ROOT)})


def report(task, cells, out):
    """The table of a task, the ratio to the best baseline, and the picture."""
    results = {cell["model"]: json.loads((folder / "result.json").read_text())
               for cell, folder in cells if (folder / "result.json").exists()}
    if not results:
        return
    first = next(iter(results.values()))
    weights = resamplings(len(first["rollout"]))
    data = " ".join(f"{key}={value}" for key, value in first["data"].items())
    print(f"\n{task} ({data}), {first['seconds']:g} s of training each, {first['device']}, "
          f"{first['at']}\nnRMSE over {len(first['rollout'])} test trajectories, roll-out of "
          f"{len(first['by_lead'])} steps from the first frame, 95 % intervals")
    width = max(len(model) for model in results)
    print(f"{'':{width}} {'params':>9} {'batch':>5} {'steps':>7} {'train s':>7} {'compile s':>9} "
          f"{'one step':>9}  {'interval':19} {'roll-out':>9}  interval")
    for model, r in results.items():
        row = f"{model:{width}} {r['parameters']:9,} {r['batch_size']:5} {r['steps']:7,} "
        row += f"{r['train_seconds']:7.1f} {r['compile_seconds']:9.0f}"
        for name in ("one_step", "rollout"):
            values = torch.tensor(r[name], dtype=torch.float64)
            low, high = interval(values[:, None], weights)[:, 0]
            row += f" {values.mean():9.2e}  [{low:.2e}, {high:.2e}]"
        print(row)
    ours = [model for model in results if model.startswith("operator")]
    theirs = [model for model in results if model not in ours]
    if ours and theirs:
        means = {m: torch.tensor(results[m]["rollout"], dtype=torch.float64) for m in results}
        best = min(theirs, key=lambda m: means[m].mean())
        for model in ours:
            ratios = (weights @ means[model]) / (weights @ means[best])
            low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
            print(f"roll-out of {model} / {best}: {means[model].mean() / means[best].mean():.2f} "
                  f"[{low:.2f}, {high:.2f}]")
    try:
        draw(out / f"{task}_{first['seconds']:g}s.png", task, results)
    except ImportError as error:
        print(f"no picture: {error}")


def draw(path, task, results):
    """Validation error against training time, and test error against lead time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for model, r in results.items():
        label = f"{model} ({r['parameters'] / 1e6:.1f} M)"
        left.plot(*zip(*r["curve"], strict=True), marker="o", ms=4, lw=1.8, label=label)
        leads = range(1, len(r["by_lead"]) + 1)
        right.plot(leads, r["by_lead"], lw=1.8, marker="o" if len(leads) < 2 else "", label=label)
    left.set(xlabel="seconds of training", ylabel="nRMSE of the roll-out, val", yscale="log",
             title="error against training time", xlim=(0, None))
    right.set(xlabel="step of the roll-out", ylabel="nRMSE, test", yscale="log",
              title="error against lead time, at the end")
    for axis in (left, right):
        axis.grid(alpha=0.3, which="both", lw=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    first = next(iter(results.values()))
    figure.suptitle(f"{task}, {first['seconds']:g} s of training each, {first['device']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"picture: {path}")


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    out, device = Path(cfg.out).resolve(), "CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    cells = {}  # task -> [(cell, its folder)]
    for task, model in itertools.product(dict.fromkeys(cfg.task), dict.fromkeys(cfg.models)):
        data = {"preset": cfg.preset} | (DATA.get(task, {}) if cfg.preset == "medium" else {})
        cell = {"task": task, "model": model, "seconds": cfg.seconds, "seed": cfg.seed,
                "device": device, "data": data}
        key = digest(cell | {"model": "", "settings": settings(cell)})
        cell |= {"folder": str(out / "data" / f"{task}_{digest(data)}")}
        cells.setdefault(task, []).append((cell, out / f"{task}_{model.split()[0]}_{key}"))
    todo = [(cell, folder) for task in cells.values() for cell, folder in task
            if not (folder / "result.json").exists()]
    make_data([cell for cell, _ in todo])
    jobs = {folder: launch(cell, folder) for cell, folder in todo}
    failed, done = [], set()
    while len(done) < len(cells):
        for task in cells:
            mine = [jobs[folder] for _, folder in cells[task] if folder in jobs]
            if task not in done and all(job.poll() is not None for job in mine):
                done.add(task)
                report(task, cells[task], out)
        time.sleep(0.2)
    for folder, job in jobs.items():
        if job.returncode:
            failed.append(folder)
            tail = (folder / "log.txt").read_text().splitlines()[-3:]
            print(f"{folder.name} failed: {' | '.join(tail)}", file=sys.stderr)
    print(NRMSE + ".")
    return bool(failed)


if __name__ == "__main__":
    command(main)
