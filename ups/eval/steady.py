"""Draw steady fields from their prior, and judge them beside the law of their size.

Inputs are answered in every mirror image that the facts allow, and the answers, mirrored back, are
averaged. Member m of an ensemble is that mean plus what was drawn in one of the images, in turn.
"""

import torch

from ups.data.augment import moved, symmetries
from ups.eval.ensemble import member_noise
from ups.eval.finish import write_test
from ups.eval.forecasts import make_forecasts
from ups.eval.measure import best_median_worst, judge, score_table
from ups.eval.metrics import crps
from ups.eval.plots import draw_steady, picture, three
from ups.train.step import exact_inference

FACTORS = torch.logspace(-2, 2, 81, 2)  # that draws may be scaled by, a quarter to four times
COLUMNS = {"nrmse": "nRMSE", "sample_nrmse": "one member", "crps": "CRPS", "spread_skill": "spread"}


def images(task):
    """Every mirror image that the facts allow, for `moved`: (K, 3), the first is none."""
    count = len(symmetries(task.fields)[1])
    numbers = [torch.tensor([1.0, 0.0])] * count + [torch.ones(1)] * (3 - count)
    return torch.cartesian_prod(*numbers)


def read(task, chosen, device):
    """Solutions u (B, C, *grid), inputs v (B, E, *grid) or None, cond (B, P) of some samples."""
    v = task.fields.inputs(chosen)
    return (task.fields.read(chosen)[:, 1].to(device), v if v is None else v[:, 0].to(device),
            task.cond(chosen).to(device))


@exact_inference
def draw(prior, task, chosen, members, calls):
    """Mean (B, C, *grid) and members (B, M, C, *grid) of the answers to some samples' inputs. A
    member is a function of sample and number; with one call all are the mean."""
    mirrors, device, count = images(task), prior.scale.device, len(chosen)
    _, v, cond = read(task, chosen, device)
    size, mirror, tokens = prior.size(v, cond), mirrors.repeat(count, 1).to(device), None
    size, cond = (x.repeat_interleave(len(mirrors), 0) for x in (size, cond))
    if v is not None:
        v = v.repeat_interleave(len(mirrors), 0)[:, None]
        v = moved(v, task.fields, mirror=mirror, channels=task.facts.inputs)[:, 0]
        tokens = task.codec.encode_inputs(v)
    x = prior(cond, tokens)

    def field(x, size, mirror):
        u = task.decode(prior.latent(x, size)[:, None])
        return moved(u, task.fields, mirror=mirror)[:, 0].unflatten(0, (count, -1))

    means = field(x, size, mirror)
    mean = means.mean(1)
    if calls == 1:
        return mean, mean[:, None].expand(-1, members, *mean.shape[1:])
    which = torch.arange(members, device=device) % len(mirrors)
    x, size, mirror, cond, tokens = (
        None if t is None else t.unflatten(0, (count, -1))[:, which].flatten(0, 1)
        for t in (x, size, mirror, cond, tokens))
    noise = member_noise(0, chosen, members, device, 0, x[0].numel()).view_as(x)
    x = x + prior.draw(cond, tokens, noise, calls - 1)
    return mean, mean[:, None] + field(x, size, mirror) - means[:, which]


def steady_forecasts(prior, task, members, calls):
    """Forecasts of one lead: members, their mean alone in one call, the mean of train scaled by
    the law of its size, and encoding and decoding the truth."""
    def law(s):
        _, v, cond = read(task, s.chosen, s.u.device)
        zero = torch.zeros(len(s.u), *prior.zero.shape, device=s.u.device)
        yield task.decode(prior.latent(zero, prior.size(v, cond)))[:, None]

    return {"members": lambda s: iter([draw(prior, task, s.chosen, members, calls)[1]]),
            "alone": lambda s: iter([draw(prior, task, s.chosen, 1, 1)[1]]), "law": law,
            "codec": make_forecasts(task, 0, None)["codec"]}


def validate_steady(run, prior, task, calls):
    """Validation scores in physical units; with one call they are those of the mean."""
    forecasts = {"members": steady_forecasts(prior, task, run.cfg.members, calls)["members"]}
    found, _ = judge(run.accelerator, task, forecasts,
                     task.fields.split("val")[: run.cfg.val_trajectories], only=COLUMNS,
                     members=run.cfg.members)
    return {f"val/{name}": found["members"]["scores"][name]["all"] for name in COLUMNS
            if calls > 1 or name != "spread_skill"}


@exact_inference
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


def calibrate(prior, task, members, calls):
    """Scale what is drawn so that the CRPS on the fit split is least. Every rank finds the same.

    Residuals of the samples that the networks saw are smaller than others, and a few samples are
    far off: the ratio of spread and skill on so few would follow those alone.
    """
    scores = 0
    for chosen in task.fields.split("fit").split(16):
        mean, drawn = draw(prior, task, chosen, members, calls)
        u, mean = read(task, chosen, drawn.device)[0], mean[:, None]
        scores = scores + torch.stack([crps(mean + factor * (drawn - mean), u).mean(1).sum()
                                       for factor in FACTORS])
    prior.scale.mul_(FACTORS[scores.argmin().item()])


def test_steady(run, prior, task):
    """Test once; table, `test.json` and picture. Every rank calls."""
    members, calls, test = run.cfg.members, run.cfg.calls, task.fields.split("test")
    found, tables = judge(run.accelerator, task, steady_forecasts(prior, task, members, calls),
                          test, only=COLUMNS, members=members)
    write_test(run, {task.name: {"trajectories": len(test), "calls": calls, "forecasts": found}})
    chosen = best_median_worst(tables["members"]["nrmse"], test)
    u, v, _ = read(task, chosen, "cpu")
    drawn = draw(prior, task, chosen, members, calls)[1].cpu()  # every rank
    if run.accelerator.is_main_process:
        print(score_table(
            f"{task.name}: {' '.join(task.facts.channels)} of {len(test)} test samples, {members} "
            f"members, {calls} calls each; of the mean a call for each of {len(images(task))} "
            "images", found, COLUMNS, ".2e"))
        picture(run.folder / "steady.png", draw_steady, task.facts, v, u, drawn,
                three(tables["members"]["nrmse"].nanmean(2).numpy()))
