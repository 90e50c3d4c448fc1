"""Judge the steady prior in physical units, beside the stored solution and the equation itself.

The equation has no preferred direction, so the coefficient is answered in every orientation of the
square, and the answers, turned back, are averaged. Member m of an ensemble is that mean plus what
was drawn in orientation m modulo 8: with eight members or more, each costs one network call for
its part of the mean and `calls` - 1 for its deviation. Errors are those of u; a is given.
"""

import functools
import math

import torch

from ups.data.solvers import darcy2d
from ups.eval.ensemble import member_noise
from ups.eval.metrics import DEFINITIONS, crps, mae, nrmse, ratio, spread_skill
from ups.eval.plots import draw_steady, picture
from ups.eval.rollout import by_trajectory
from ups.models.steady import orientations, size_of, turned, turned_back
from ups.train.ranks import now
from ups.train.step import eager

ROWS = 1024       # members that are drawn at a time
FACTORS = torch.logspace(-2, 2, 81, 2)  # that draws may be scaled by, a quarter to four times
TOLERANCES = (1e-3, 1e-6)  # that iterations are counted to
SEED = 0          # of the noise of members
DEFINITION = {
    "nrmse": "nRMSE = |p - u|_2 / |u|_2 over space, of the steady field u alone (the coefficient "
             "is given), mean over samples; physical units",
    "residual": "residual = rms over space of div(a grad u) + beta, relative to |beta|, with the "
                "solver's own discretisation and the true a; mean over samples",
    **{name: DEFINITIONS[name] for name in ("crps", "mae", "spread_skill")},
    "iterations": "iterations of conjugate gradients until the preconditioned norm of the residual "
                  f"is {' or '.join(f'{t:g}' for t in TOLERANCES)} of that of u = 0, mean over "
                  "samples",
}


@eager
@torch.no_grad()
def draw(prior, task, frame, cond, noise, calls):
    """Mean (B, *grid) and members (B, M, *grid) of u for frames (a, 0) (B, C, *grid).

    noise (B, M, N, D) are normal numbers; with one call, members are all the mean.
    """
    turns, (count, members) = orientations(task.codec.grid), noise.shape[:2]
    turn = torch.arange(turns, device=frame.device).repeat(count)
    view = turned(frame.repeat_interleave(turns, 0), turn)
    cond = cond.repeat_interleave(turns, 0)
    z0, size = task.codec.encode(view), size_of(view[:, 0], cond)
    x = prior(z0, cond)

    def field(z0, x, size, turn):
        return turned_back(task.codec.decode(prior.latent(z0, x, size))[:, 1], turn)

    means = field(z0, x, size, turn).unflatten(0, (count, turns))
    mean = means.mean(1)
    if calls == 1:
        return mean, mean[:, None].expand(-1, members, -1, -1)
    which = torch.arange(members, device=frame.device) % turns
    z0, x, size, cond, turn = (t.unflatten(0, (count, turns))[:, which].flatten(0, 1)
                               for t in (z0, x, size, cond, turn))
    x = x + prior.draw(z0, cond, noise.flatten(0, 1), calls - 1)
    drawn = field(z0, x, size, turn).unflatten(0, (count, members))
    return mean, mean[:, None] + drawn - means[:, which]


def noise_of(task, chosen, members):
    """Normal numbers (B, M, N, D), a function of seed, trajectory and member alone."""
    spec = task.codec.spec
    names = [int(n) * 65536 + member for n in chosen for member in range(members)]
    noise = member_noise(SEED, names, math.prod(spec.tokens), spec.width)
    return noise.unflatten(0, (len(chosen), members))


def measure_steady(accelerator, prior, task, split, members, calls, limit=None, **more):
    """Scores (n, 1) by name of every sample of a split; `refine` adds iterations of the solver."""
    tables = functools.partial(_tables, accelerator.device, prior, task, members, calls, **more)
    return by_trajectory(accelerator, tables, task.fields.split(split)[:limit],
                         rows_of(task, members))


def rows_of(task, members):
    """Samples that are answered at a time."""
    return ROWS // max(members, orientations(task.codec.grid))


@torch.no_grad()
def _tables(device, prior, task, members, calls, chosen, refine=None):
    u, cond = task.fields.read(chosen).to(device), task.cond(chosen).to(device)
    noise, truth = noise_of(task, chosen, members).to(device), u[:, 1, 1]
    began = now()
    mean, drawn = draw(prior, task, u[:, 0], cond, noise, calls)
    seconds = now() - began
    fields = {"mean": mean, "members": drawn.mean(1), "sample": drawn[:, 0]}
    spread = drawn if calls > 1 else mean[:, None].expand(-1, 2, -1, -1)
    variance, square_error = spread_skill(spread[:, :, None], truth[:, None])
    tables = {"crps": crps(spread[:, :, None], truth[:, None]),
              "mae": mae(mean[:, None, None], truth[:, None, None])[:, 0],
              "variance": variance, "square_error": square_error,
              "milliseconds": torch.full((len(u), 1), 1e3 * seconds / noise[:, :, 0, 0].numel())}
    if refine is not None:
        fields |= _beside(prior, task, u, cond)
        more, iterations = _refined(u, 10 ** cond[:, 0], mean, refine)
        fields, tables = fields | more, tables | iterations
    for name, p in fields.items():
        tables[f"nrmse_{name}"] = nrmse(p[:, None, None], truth[:, None, None])
        if refine is not None:
            tables[f"residual_{name}"] = _residual(u, p, cond)
    return tables


def _beside(prior, task, u, cond):
    """What needs no network: the scaled mean of train, the codec alone, the stored solution."""
    z0, z1 = task.codec.encode(u.flatten(0, 1)).unflatten(0, u.shape[:2]).unbind(1)
    scaled = prior.latent(z0, torch.zeros_like(z0), size_of(u[:, 0, 0], cond))
    return {"train": task.codec.decode(scaled)[:, 1], "codec": task.codec.decode(z1)[:, 1],
            "stored": u[:, 1, 1]}


def _residual(u, p, cond):
    """Of the equation, (B, 1); it is linear, so that beta = 1 stands for all."""
    return darcy2d.residual(u[:, 1, :1], p[:, None] / 10 ** cond[:, :1, None, None], 1.0)[:, None]


def _refined(u, beta, p, iterations):
    """Fields after some iterations of the solver from p and from zero, and how many it takes."""
    a, beta = u[:, 1, :1], beta.view(-1, 1, 1, 1)
    fields, tables, first = {}, {}, None
    for name, start in (("zero", None), ("refined", p[:, None] / beta)):
        path, norms = darcy2d.polish(a, start, 1.0, min(TOLERANCES))
        first = norms[0] if first is None else first
        fields[name] = (path[min(iterations, len(path) - 1)] * beta)[:, 0]
        done = [(norms <= tolerance * first).cumsum(0) > 0 for tolerance in TOLERANCES]
        tables[f"iterations_{name}"] = torch.stack([(~there).sum(0) for there in done], 1)
    return fields, tables


def summary(tables, members):
    """Means over samples; spread / skill is the ratio of means."""
    mean = {name: table.mean(0).tolist() for name, table in tables.items()}
    mean = {name: value[0] if len(value) == 1 else value for name, value in mean.items()}
    variance, square_error = mean.pop("variance"), mean.pop("square_error")
    mean["spread_skill"] = float(ratio(torch.tensor(variance), torch.tensor(square_error), members))
    return mean


def calibrate(accelerator, prior, task, members, calls):
    """Scale what is drawn so that the CRPS on the fit split is least.

    Residuals of the samples that the networks saw are smaller than others, and a few samples are
    far off: the ratio of spread and skill on so few would follow those alone.
    """
    @torch.no_grad()
    def tables(chosen):
        u, cond = (t.to(accelerator.device) for t in (task.fields.read(chosen), task.cond(chosen)))
        noise = noise_of(task, chosen, members).to(u)
        mean, drawn = (t[:, None, None] if t.ndim == 3 else t[:, :, None]
                       for t in draw(prior, task, u[:, 0], cond, noise, calls))
        return {"crps": torch.cat([crps(mean + factor * (drawn - mean), u[:, 1, 1:])
                                   for factor in FACTORS], 1)}

    scores = by_trajectory(accelerator, tables, task.fields.split("fit"), rows_of(task, members))
    prior.scale.mul_(FACTORS[scores["crps"].mean(0).argmin()])


# the end of the stage


def measure_operator(accelerator, operator):
    """nRMSE and residual of u after one step of an operator: (model, its task, its index)."""
    model, task, index = operator

    @torch.no_grad()
    def tables(chosen):
        u = task.fields.read(chosen).to(accelerator.device)
        cond = task.cond(chosen).to(u)
        dt = torch.full((len(u),), task.fields.facts.dt, device=u.device)
        z1 = model(task.encode(u[:, 0]), dt, cond, index)
        p = task.decode(z1)[:, 1]
        return {"nrmse_operator": nrmse(p[:, None, None], u[:, 1:, 1:]),
                "residual_operator": _residual(u, p, cond)}

    found = by_trajectory(accelerator, tables, task.fields.split("test"), 64)
    return {name: table.mean().item() for name, table in found.items()}


def finish_steady(run, prior, task, operator):
    """Test once, beside an `operator` or None; table, `test.json` and picture. Every rank calls."""
    accelerator, cfg = run.accelerator, run.cfg
    measured = functools.partial(measure_steady, accelerator, prior, task)
    tables = measured("test", cfg.members, cfg.calls, refine=cfg.refine)
    result = {"samples": len(tables["crps"]), "members": cfg.members, "calls": cfg.calls,
              "refine": cfg.refine, **summary(tables, cfg.members)}
    if operator is not None:
        result |= measure_operator(accelerator, operator)
    result["val_by_calls"] = {calls: summary(measured("val", cfg.members, calls), cfg.members)
                              for calls in cfg.table}
    order = tables["nrmse_members"][:, 0].argsort()
    picks = order[[0, len(order) // 2, -1]]  # best, median, worst
    chosen = task.fields.split("test")[picks]
    u, cond = task.fields.read(chosen).to(accelerator.device), task.cond(chosen)
    noise = noise_of(task, chosen, cfg.members).to(u)
    _, members = draw(prior, task, u[:, 0], cond.to(u), noise, cfg.calls)  # every rank
    if not accelerator.is_main_process:
        return
    run.write("test.json", {"definition": DEFINITION, "split": "test",
                            "tasks": {task.name: result}})
    print(table(task, result, cfg))
    picture(run.folder / "steady.png", draw_steady, task.fields.facts, u[:, 1].cpu(), members.cpu(),
            tables["nrmse_members"][picks, 0])


ROWS_OF_TABLE = {
    "members": "mean of {members} members, {calls} calls each",
    "mean": "mean alone, a call for each of 8 turns",
    "sample": "one member",
    "operator": "operator, one step",
    "train": "mean of train, scaled by beta / mean(a)",
    "refined": "{refine} iterations from the mean",
    "zero": "{refine} iterations from zero",
    "codec": "codec floor",
    "stored": "stored solution",
}


def table(task, result, cfg):
    """The scores as text."""
    lines = [f"\n{task.name}: u of {result['samples']} test coefficients",
             f"{'':42}{'nRMSE':>10}{'residual':>11}"]
    for name, label in ROWS_OF_TABLE.items():
        if f"nrmse_{name}" in result:
            lines.append(f"{label.format(**result):42}{result[f'nrmse_{name}']:10.2e}"
                         f"{result[f'residual_{name}']:11.2e}")
    if "nrmse_operator" not in result:
        lines.append("(an operator gets a row here by `accelerate launch train_operator.py --run "
                     f"{cfg.run}_operator --tasks {' '.join(cfg.tasks)}`, then this stage with "
                     f"--operator {cfg.run}_operator)")
    lines += [f"CRPS {result['crps']:.2e} (absolute error of the mean {result['mae']:.2e}), "
              f"spread / skill {result['spread_skill']:.2f}",
              *[f"iterations to {tolerance:g}: {zero:.1f} from zero, {mean:.1f} from the mean "
                f"({100 * (1 - mean / zero):.0f} % saved)" for tolerance, zero, mean in
                zip(TOLERANCES, result["iterations_zero"], result["iterations_refined"],
                    strict=True)],
              "\non the val split, by network calls per member",
              "calls   nRMSE mean  nRMSE one       CRPS  spread/skill  ms per member"]
    for calls, row in result["val_by_calls"].items():
        lines.append(f"{calls:5}{row['nrmse_members']:13.2e}{row['nrmse_sample']:11.2e}"
                     f"{row['crps']:11.2e}{row['spread_skill']:14.2f}{row['milliseconds']:15.2f}")
    return "\n".join(lines)
