"""Draw steady fields from their prior, and judge them beside the law of its size and the equation.

Inputs are answered in every mirror image that the facts allow, and the answers, mirrored back, are
averaged. Member m of an ensemble is that mean plus what was drawn in one of the images, in turn.
Errors are those of the solution; inputs are given. The forecasts, of one lead:

    steady        members               steady_mean   the mean alone, in one call
    law           the mean of train, scaled by the law of its size
    codec         decode(encode(u))     stored        the solution itself, for its residual
"""

import itertools
import math

import torch

from ups.data.augment import moved, symmetries
from ups.data.solvers import residual_of
from ups.eval.ensemble import member_noise
from ups.eval.finish import mean_error
from ups.eval.forecasts import yardsticks
from ups.eval.measure import best_median_worst, measure
from ups.eval.metrics import DEFINITIONS, crps, ratio
from ups.eval.plots import draw_steady, picture
from ups.train.step import exact_inference

FACTORS = torch.logspace(-2, 2, 81, 2)  # that draws may be scaled by, a quarter to four times
SEED = 0          # of the noise of members
SHOWN = {"members": "steady", "mean": "steady_mean", "law": "law", "codec": "codec",
         "stored": "stored"}  # forecasts by their names in test.json
DEFINITION = {
    "nrmse": "nRMSE = |p - u|_2 / |u|_2 over space, of the steady field u alone (inputs are "
             "given), mean over channels and samples; physical units",
    **{name: DEFINITIONS[name] for name in ("residual", "crps", "mae", "spread_skill")}}


def images(task):
    """Every mirror image that the facts allow, for `moved`: (K, 3), the first is none."""
    count = len(symmetries(task.fields)[1])
    return torch.tensor([(*row, *(1.0,) * (3 - count))
                         for row in itertools.product((1.0, 0.0), repeat=count)])


@exact_inference
@torch.no_grad()
def draw(prior, task, v, cond, noise, calls):
    """Mean (B, C, *grid) and members (B, M, C, *grid) of u, for inputs v (B, E, *grid) or None.

    noise (B, M, N, D) are normal numbers; with one call, members are all the mean.
    """
    mirrors, (count, members) = images(task).to(noise), noise.shape[:2]
    size, tokens = prior.size(v, cond), None
    mirror = mirrors.repeat(count, 1)
    size, cond = (x.repeat_interleave(len(mirrors), 0) for x in (size, cond))
    if v is not None:
        v = v.repeat_interleave(len(mirrors), 0)[:, None]
        v = moved(v, task.fields, mirror=mirror, channels=task.facts.inputs)[:, 0]
        tokens = task.codec.encode_inputs(v)
    x = prior(cond, tokens)

    def field(x, size, mirror):
        u = task.decode(prior.latent(x, size)[:, None])
        return moved(u, task.fields, mirror=mirror)[:, 0]

    means = field(x, size, mirror).unflatten(0, (count, -1))
    mean = means.mean(1)
    if calls == 1:
        return mean, mean[:, None].expand(-1, members, *mean.shape[1:])
    which = torch.arange(members, device=noise.device) % len(mirrors)

    def chosen(t):
        return None if t is None else t.unflatten(0, (count, -1))[:, which].flatten(0, 1)

    x, size, mirror, cond, tokens = map(chosen, (x, size, mirror, cond, tokens))
    x = x + prior.draw(cond, tokens, noise.flatten(0, 1), calls - 1)
    drawn = field(x, size, mirror).unflatten(0, (count, members))
    return mean, mean[:, None] + drawn - means[:, which]


def read(task, chosen, device):
    """Solutions u (B, C, *grid), inputs (B, E, *grid) or None, cond (B, P) of some samples."""
    v = task.fields.inputs(chosen)
    return (task.fields.read(chosen)[:, 1].to(device), v if v is None else v[:, 0].to(device),
            task.cond(chosen).to(device))


def noise_of(task, chosen, members):
    """Normal numbers (B, M, N, D), a function of seed, sample and member alone."""
    shape = math.prod(task.codec.spec.tokens), task.codec.spec.width
    return member_noise(SEED, chosen, members, "cpu", 0, math.prod(shape)).unflatten(2, shape)


def steady_forecasts(prior, task, members, calls):
    """Forecasts by name of one steady task."""
    def drawn(s, calls):
        _, v, cond = read(task, s.chosen, s.u.device)
        return draw(prior, task, v, cond, noise_of(task, s.chosen, members).to(s.u), calls)

    def law(s):
        _, v, cond = read(task, s.chosen, s.u.device)
        zero = torch.zeros(len(s.u), *prior.zero.shape, device=s.u.device)
        yield task.decode(prior.latent(zero, prior.size(v, cond)))[:, None]

    return {"steady": lambda s: iter([drawn(s, calls)[1]]),
            "steady_mean": lambda s: iter([drawn(s, 1)[0][:, None]]),
            "law": law, "codec": yardsticks(task)["codec"],
            "stored": lambda s: iter([s.u[:, 1:]])}


def residuals(task):
    """What `measure` may add: the residual of the mean and of one member, where a solver knows."""
    residual = residual_of(task.facts)

    def extra(s, p):
        _, v, _ = read(task, s.chosen, s.u.device)
        params = task.fields.params(s.chosen).to(s.u.device)
        fields = {"residual": p.mean(1), "sample_residual": p[:, 0]}
        return {name: residual(v, field, params) for name, field in fields.items()}

    return extra if residual else None


def validate_steady(run, prior, task, calls):
    """Validation scores in physical units; with one call they are those of the mean."""
    members = run.cfg.members
    forecasts = steady_forecasts(prior, task, members, calls)
    tables, _ = measure(run.accelerator, task, {"steady": forecasts["steady"]},
                        task.fields.split("val")[: run.cfg.val_trajectories],
                        only=("nrmse", "sample_nrmse", "crps", "spread_skill"), members=members)
    scores = scores_of(tables["steady"], members)
    if calls == 1:
        del scores["spread_skill"]
    return {f"val/{name}": value for name, value in scores.items()}


def scores_of(tables, members):
    """Means over samples; spread / skill is the ratio of means."""
    spread = tables["spread_skill"].mean((0, 1, 2))
    return {"nrmse": mean_error(tables), "nrmse_sample": tables["sample_nrmse"].nanmean().item(),
            "crps": tables["crps"].mean().item(),
            "spread_skill": ratio(*spread, members).item()}


@exact_inference
@torch.no_grad()
def left_over(prior, task, limit=256):
    """Deviation (D,) of x - m over the fit split, which the mean was not trained on."""
    squares = []
    for chosen in task.fields.split("fit")[:limit].split(32):
        u, v, cond = read(task, chosen, prior.scale.device)
        tokens = None if v is None else task.codec.encode_inputs(v)
        x = prior.coordinates(task.encode(u), prior.size(v, cond))
        squares.append((x - prior(cond, tokens)).double().square().mean(1))
    deviation = torch.cat(squares).mean(0).sqrt()
    return deviation.clamp(min=1e-6 * deviation.max())


def calibrate(accelerator, prior, task, members, calls):
    """Scale what is drawn so that the CRPS on the fit split is least.

    Residuals of the samples that the networks saw are smaller than others, and a few samples are
    far off: the ratio of spread and skill on so few would follow those alone.
    """
    forecasts = steady_forecasts(prior, task, members, calls)

    def scaled(s, drawn):
        (mean,) = forecasts["steady_mean"](s)
        return {"crps_scaled": torch.stack([crps(mean + factor * (drawn - mean), s.u[:, 1]).mean(1)
                                            for factor in FACTORS], 1)}

    tables, _ = measure(accelerator, task, {"steady": forecasts["steady"]},
                        task.fields.split("fit"), only=(), members=members, extra=scaled)
    prior.scale.mul_(FACTORS[tables["steady"]["crps_scaled"].mean((0, 1)).argmin()])


def test_steady(run, prior, task):
    """Test once; table, `test.json` and picture. Every rank calls."""
    accelerator, cfg, test = run.accelerator, run.cfg, task.fields.split("test")
    tables, _ = measure(accelerator, task, steady_forecasts(prior, task, cfg.members, cfg.calls),
                        test, members=cfg.members, extra=residuals(task))
    own = scores_of(tables["steady"], cfg.members)
    result = {"samples": len(test), "members": cfg.members, "calls": cfg.calls,
              "crps": own["crps"], "mae": tables["steady_mean"]["mae"].mean().item(),
              "spread_skill": own["spread_skill"], "nrmse_sample": own["nrmse_sample"]}
    for name, forecast in SHOWN.items():
        result[f"nrmse_{name}"] = mean_error(tables[forecast])
        if "residual" in tables[forecast]:
            result[f"residual_{name}"] = tables[forecast]["residual"].mean().item()
    if "residual_members" in result:
        result["residual_sample"] = tables["steady"]["sample_residual"].mean().item()
    chosen = best_median_worst(tables["steady"]["nrmse"], test)
    u, v, cond = read(task, chosen, accelerator.device)
    noise = noise_of(task, chosen, cfg.members).to(u)
    _, members = draw(prior, task, v, cond, noise, cfg.calls)  # every rank
    if accelerator.is_main_process:
        run.write("test.json", {"definition": DEFINITION, "split": "test",
                                "tasks": {task.name: result}})
        print(table(task, result))
        scores = [tables["steady"]["nrmse"][test == one].mean().item() for one in chosen]
        picture(run.folder / "steady.png", draw_steady, task.facts, v if v is None else v.cpu(),
                u.cpu(), members.cpu(), scores)


def table(task, result):
    """The scores as text."""
    labels = {"members": f"mean of {result['members']} members, {result['calls']} calls each",
              "mean": f"mean alone, a call for each of {len(images(task))} mirror images",
              "sample": "one member", "law": "mean of train, scaled by the law of its size",
              "codec": "codec floor", "stored": "stored solution"}
    known = "residual_stored" in result
    lines = [f"\n{task.name}: {' '.join(task.facts.channels)} of {result['samples']} test samples",
             f"{'':46}{'nRMSE':>10}" + "  residual" * known]
    for name, label in labels.items():
        residual = f"{result[f'residual_{name}']:10.2e}" if known else ""
        lines.append(f"{label:46}{result[f'nrmse_{name}']:10.2e}{residual}")
    lines.append(f"CRPS {result['crps']:.2e} (absolute error of the mean {result['mae']:.2e}), "
                 f"spread / skill {result['spread_skill']:.2f}")
    return "\n".join(lines)
