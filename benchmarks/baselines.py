"""The yardsticks of benchmarks/accuracy.py: how an FNO and a U-Net step a field and are trained.

They have what the operator has: normalised data, the change as output, conserved means kept, the
relative loss, Muon, mirror images and sums, noise on the first frame and averaged weights. Their
data lie on the device, and with CUDA a whole training step is one graph.
"""

import dataclasses
import math

import torch
from torch import nn

from benchmarks.bench import MOMENTS, VAL, WARMUP, alone, steps_within, trial_steps
from benchmarks.networks import FNO, FNOConfig, UNet, UNetConfig
from ups.cache.windows import starts_of
from ups.config import parse
from ups.data.augment import moved
from ups.data.find import open_fields
from ups.eval.metrics import nrmse
from ups.models.precision import TRAINING, products
from ups.train.ema import EMA
from ups.train.optim import Muon, set_lr
from ups.train.ranks import now
from ups.train.step import CudaGraphed, exact_inference


@dataclasses.dataclass(frozen=True)
class Recipe:
    batch_size: int = 64
    lr: float = 4e-3
    rms: float = 0.4        # of Muon's updates, as a multiple of lr
    weight_decay: float = 1e-5
    grad_clip: float = 1.0
    ema: float = 0.999
    noise: float = 0.8      # on the first frame / its change in the step, as in train_operator.py
    noise_end: float = 0.008  # the same at the last step
    shift: bool = False     # random circular shifts of periodic tasks, which an FNO does not need
    mirror: bool = True     # random mirror images, where they are solutions too, as the operator's
    sums: bool = True       # of moved solutions of a linear task, as the operator's


@dataclasses.dataclass(frozen=True)
class FNORecipe(Recipe):
    model: FNOConfig = FNOConfig()


@dataclasses.dataclass(frozen=True)
class UNetRecipe(Recipe):
    lr: float = 5e-4
    shift: bool = True
    model: UNetConfig = UNetConfig()


BASELINES = {"fno": (FNO, FNORecipe), "unet": (UNet, UNetRecipe)}
CHOSEN = {  # for 100 s on one H200, on validation, by kind and number of axes, then by task
    ("fno", 1): "--noise_end 8e-4 --model.modes 129",  # all waves
    ("fno", "advection1d"): "--lr 8e-3 --rms 0.2",
    ("fno", 2): "--batch_size 32 --noise_end 8e-4 --lr 8e-3 --rms 0.1 --model.modes 32 "
                "--model.width 48",
    ("fno", "diffreact2d"): "--model.modes 41 --model.width 32",
    ("fno", "ns2d"): "--lr 4e-3 --noise_end 8e-3",  # larger steps overflowed, with 12 waves
    ("unet", 1): "--model.width 64 --noise_end 8e-4",
    ("unet", "burgers1d"): "--lr 2e-3 --rms 0.1",
    ("unet", "advection1d"): "--no-mirror --no-sums",
    ("unet", 2): "--batch_size 32 --noise_end 8e-4 --lr 2.5e-4",
    ("unet", "diffreact2d"): "--lr 8e-3 --rms 0.025",
    ("unet", "swe2d"): "--lr 4e-3 --rms 0.025",
}


def chosen_for(kind, task):
    """The flags of a kind of model for a task; the operator has none."""
    keys = int(task[-2]), task  # the axes end the name: burgers1d
    return " ".join(CHOSEN.get((kind, key), "") for key in keys).split()


class Stepper(nn.Module):
    """u (B, C, *grid) -> the next frame, in physical units: normalised, a net for the change.

    The net's output is in units of the typical change in a step, and what the equation conserves
    is taken out of it, as in our operator. The net also sees dt, the PDE's parameters, and the
    place where it counts: x itself in a closed domain, waves along a forced periodic axis.
    """

    def __init__(self, net, config, fields, mean, std, change):
        super().__init__()
        spec, planes = fields.facts, []
        periodic = all(spec.periodic)
        places = torch.meshgrid(*((torch.arange(n) + 0.5) / n for n in spec.grid), indexing="ij")
        for axis, x in enumerate(places):
            if not periodic:
                planes.append(2 * x - 1)
            elif spec.axes[axis] not in spec.shifts:
                planes += [wave(2 * math.pi * k * x) for k in (1, 2, 4)
                           for wave in (torch.sin, torch.cos)]
        places = torch.stack(planes) if planes else torch.zeros(0, *spec.grid)
        inputs = len(spec.channels) + len(places) + 1 + len(spec.params)
        self.net = net(config, inputs, len(spec.channels), spec.grid, periodic)
        kept = torch.tensor([float(c in spec.conserved) for c in spec.channels])
        kept = kept.view(-1, *[1] * len(spec.grid))
        for name, value in {"places": places, "mean": mean, "std": std, "change": change,
                            "kept": kept}.items():
            self.register_buffer(name, value)

    @property
    def hidden(self):
        """The layers whose matrices are Muon's."""
        return self.net.hidden

    def forward(self, u, cond):
        """u (B, C, *grid), cond (B, 1 + P) -> (B, C, *grid)"""
        x = (u - self.mean) / self.std
        grid = (1,) * (u.ndim - 2)
        cond = cond.view(*cond.shape, *grid).expand(*cond.shape, *u.shape[2:])
        places = self.places.expand(len(u), *self.places.shape)
        update = self.net(torch.cat([x, cond, places], 1))
        return u + self.change * (update - self.kept * update.mean(grid_axes(u), keepdim=True))


def grid_axes(u):
    return tuple(range(2, u.ndim))


def conditions(fields, indices, device):
    """log10 of dt, and the parameters as the operator gets them: (n, 1 + P)."""
    dt = torch.full((len(indices), 1), math.log10(fields.facts.dt))
    return torch.cat([dt, fields.facts.condition(fields.params(indices))], 1).to(device)


@exact_inference
def errors(model, fields, indices, device):
    """nRMSE (n, T - 1) of the roll-out from the first frame, and of one step from every frame."""
    rows, size = [], max(1, 2**26 // math.prod((fields.facts.frames, *fields.facts.grid)))
    for part in indices.split(min(64, size)):
        u, cond, rolled = fields.read(part).to(device), conditions(fields, part, device), []
        for _ in range(u.shape[1] - 1):
            rolled.append(model(rolled[-1] if rolled else u[:, 0], cond))
        single = [model(u[:, t], cond) for t in range(u.shape[1] - 1)]
        rows.append([nrmse(torch.stack(p, 1), u[:, 1:]).cpu() for p in (rolled, single)])
    return dict(zip(("rollout", "one_step"), map(torch.cat, zip(*rows, strict=True)), strict=True))


def train_baseline(cell):
    """The trained model, and what is to be told of it. Data lie on the device; with CUDA a whole
    step is one graph."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    kind, recipe = BASELINES[cell["kind"]]
    cfg, fields = parse(recipe, cell["flags"]), open_fields(cell["task"], cell["folder"])
    chosen = fields.split("train")
    u, cond = fields.read(chosen).to(device), conditions(fields, chosen, device)
    over = (0, 1, *range(3, u.ndim))
    std, mean = torch.std_mean(u, over, keepdim=True)
    change = u.diff(dim=1).square().mean(over, keepdim=True).sqrt()
    torch.manual_seed(cell["seed"])
    model = Stepper(kind, cfg.model, fields, *[x[:, 0].cpu() for x in (mean, std, change)])
    model.to(device)
    if cuda:
        model.compile(dynamic=False)
    params = list(model.parameters())
    optimizer = Muon(model, cfg.lr, rms=cfg.rms, weight_decay=cfg.weight_decay)
    ema = EMA(model, cfg.ema)
    noise = torch.tensor(cfg.noise, device=device)
    starts = starts_of(u.shape[1] - 1).to(device)

    def loss_of():
        row = torch.randint(len(u), (cfg.batch_size,), device=device)
        first = starts[torch.randint(len(starts), (cfg.batch_size,), device=device)]
        window = torch.stack([u[row, first], u[row, first + 1]], 1)
        draws = [torch.rand(len(row), n, device=device) if wanted else None
                 for wanted, n in ((cfg.shift, 3), (cfg.mirror, 3), (cfg.sums, 4))]
        u0, y = moved(window, fields, *draws).unbind(1)  # (B, C, *grid) each
        change = ((y - u0) / model.std).square().mean((1, *grid_axes(u0)), keepdim=True).sqrt()
        draw = torch.randn_like(u0)
        draw = draw - draw.mean(grid_axes(draw), keepdim=True)
        level = noise * change * torch.rand_like(change)
        p = model(u0 + level * model.std * draw, cond[row])
        error = ((p - y) / model.std).flatten(1).square().sum(1)
        size = ((y - model.mean) / model.std).flatten(1).square().sum(1)
        return (error / size.clamp(min=1e-6) + 1e-12).sqrt().mean()

    def step():
        model.zero_grad()
        with products("highest"):
            loss = loss_of()
        with products(TRAINING if cuda else "highest"):
            loss.backward()
        nn.utils.clip_grad_norm_(params, cfg.grad_clip, foreach=True)
        optimizer.step()
        ema.update(model)
        return loss.detach()

    # compile, capture and time the steps; then as if nothing had happened
    start, step = [p.detach().clone() for p in params], CudaGraphed(step, cuda)
    few, timed = trial_steps(cuda)
    for _ in range(few):
        step()
    with alone():
        begin = now()
        for _ in range(timed):
            step()
        step_s = (now() - begin) / timed
    with torch.no_grad():
        torch._foreach_copy_(params, start)
        torch._foreach_copy_(ema.shadow, start)
        for state in optimizer.state.values():
            torch._foreach_zero_(list(state.values()))
        ema.updates.zero_()

    steps, curve = cell["steps"] or steps_within(cell["seconds"], step_s), []
    warmup = max(1, round(WARMUP * steps))
    moments = {round(steps * (i + 1) / MOMENTS) for i in range(MOMENTS)}
    for k in range(steps):  # a fall along a line, as the operator's, suits them less
        fall = 0.5 + 0.5 * math.cos(math.pi * (k - warmup) / max(1, steps - warmup))
        set_lr(optimizer, cfg.lr * ((k + 1) / warmup if k < warmup else fall))
        noise.fill_(cfg.noise * (cfg.noise_end / cfg.noise) ** (k / steps))
        loss = step()
        if k + 1 in moments:
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {float(loss)} at step {k}.")
            with ema.applied(model):
                tables = errors(model, fields, fields.split("val")[:VAL], device)
            score = tables["rollout"].mean().item()
            ema.keep_best(score)
            curve.append(((k + 1) * step_s, score))
            print(f"step {k + 1} of {steps}: roll-out nRMSE {score:.4g} (val)", flush=True)
    with ema.applied(model, best=True):
        tables = errors(model, fields, fields.split(cell["split"]), device)
        best = [p.detach().clone() for p in params]
    with torch.no_grad():
        torch._foreach_copy_(params, best)
    return model, {"parameters": sum(p.numel() for p in params), "batch_size": cfg.batch_size,
                   "steps": steps, "curve": curve, "step_ms": 1e3 * step_s, "tables": tables}
