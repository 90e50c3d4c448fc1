"""Judge the steady prior in physical units, beside the law of its size and the equation itself.

Inputs are answered in every mirror image that the facts allow, and the answers, mirrored back, are
averaged. Member m of an ensemble is that mean plus what was drawn in one of the images, in turn.
Errors are those of the solution; inputs are given.
"""

import itertools
import math

import torch

from ups.data.augment import moved, symmetries
from ups.data.solvers import residual_of
from ups.eval.ensemble import member_noise
from ups.eval.metrics import DEFINITIONS, crps, mae, nrmse, ratio, spread_skill
from ups.eval.plots import draw_steady, picture
from ups.eval.rollout import by_trajectory
from ups.train.step import eager

ROWS = 1024       # members that are drawn at a time
FACTORS = torch.logspace(-2, 2, 81, 2)  # that draws may be scaled by, a quarter to four times
SEED = 0          # of the noise of members
DEFINITION = {
    "nrmse": "nRMSE = |p - u|_2 / |u|_2 over space, of the steady field u alone (inputs are "
             "given), mean over channels and samples; physical units",
    "residual": "residual = rms over space of what the equation leaves, relative to its source, "
                "with the bundled solver's own discretisation and the true inputs; mean over "
                "samples; for equations that such a solver is there for",
    **{name: DEFINITIONS[name] for name in ("crps", "mae", "spread_skill")}}


def images(task):
    """Every mirror image that the facts allow, for `moved`: (K, 3), the first is none."""
    count = len(symmetries(task.fields)[1])
    return torch.tensor([(*row, *(1.0,) * (3 - count))
                         for row in itertools.product((1.0, 0.0), repeat=count)])


@eager
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
    names = [int(n) * 65536 + member for n in chosen for member in range(members)]
    spec = task.codec.spec
    noise = member_noise(SEED, names, math.prod(spec.tokens), spec.width)
    return noise.unflatten(0, (len(chosen), members))


def measure_steady(accelerator, prior, task, split, members, calls, limit=None):
    """Scores (n, 1) by name of every sample of a split."""
    residual = residual_of(task.facts)

    @torch.no_grad()
    def tables(chosen):
        u, v, cond = read(task, chosen, accelerator.device)
        mean, drawn = draw(prior, task, v, cond, noise_of(task, chosen, members).to(u), calls)
        zero = torch.zeros(len(u), *prior.zero.shape, device=u.device)
        law = task.decode(prior.latent(zero, prior.size(v, cond)))
        fields = {"mean": mean, "members": drawn.mean(1), "sample": drawn[:, 0], "law": law,
                  "codec": task.decode(task.encode(u)), "stored": u}
        variance, square_error = spread_skill(drawn, u)
        scores = {"crps": crps(drawn, u), "mae": mae(mean[:, None], u[:, None])[:, 0],
                  "variance": variance, "square_error": square_error}
        scores = {name: score.mean(1, keepdim=True) for name, score in scores.items()}
        for name, p in fields.items():
            scores[f"nrmse_{name}"] = nrmse(p[:, None], u[:, None])
            if residual:
                params = task.fields.params(chosen).to(u.device)
                scores[f"residual_{name}"] = residual(v, p, params)[:, None]
        return scores

    rows = ROWS // max(members, len(images(task)))
    return by_trajectory(accelerator, tables, task.fields.split(split)[:limit], rows)


def summary(tables, members):
    """Means over samples; spread / skill is the ratio of means."""
    mean = {name: table.mean() for name, table in tables.items()}
    mean["spread_skill"] = ratio(mean.pop("variance"), mean.pop("square_error"), members)
    return {name: value.item() for name, value in mean.items()}


@eager
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
    @torch.no_grad()
    def tables(chosen):
        u, v, cond = read(task, chosen, accelerator.device)
        mean, drawn = draw(prior, task, v, cond, noise_of(task, chosen, members).to(u), calls)
        mean = mean[:, None]
        return {"crps": torch.stack([crps(mean + factor * (drawn - mean), u).mean(1)
                                     for factor in FACTORS], 1)}

    rows = ROWS // max(members, len(images(task)))
    scores = by_trajectory(accelerator, tables, task.fields.split("fit"), rows)
    prior.scale.mul_(FACTORS[scores["crps"].mean(0).argmin()])


def finish_steady(run, prior, task):
    """Test once; table, `test.json` and picture. Every rank calls."""
    accelerator, cfg = run.accelerator, run.cfg
    tables = measure_steady(accelerator, prior, task, "test", cfg.members, cfg.calls)
    result = {"samples": len(tables["crps"]), "members": cfg.members, "calls": cfg.calls,
              **summary(tables, cfg.members)}
    order = tables["nrmse_members"][:, 0].argsort()
    picks = order[[0, len(order) // 2, -1]]  # best, median, worst
    chosen = task.fields.split("test")[picks]
    u, v, cond = read(task, chosen, accelerator.device)
    noise = noise_of(task, chosen, cfg.members).to(u)
    _, members = draw(prior, task, v, cond, noise, cfg.calls)  # every rank
    if not accelerator.is_main_process:
        return
    run.write("test.json", {"definition": DEFINITION, "split": "test",
                            "tasks": {task.name: result}})
    print(table(task, result))
    picture(run.folder / "steady.png", draw_steady, task.facts, v if v is None else v.cpu(),
            u.cpu(), members.cpu(), tables["nrmse_members"][picks, 0])


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
