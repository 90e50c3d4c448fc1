"""Judge ensembles in physical units, against the operator alone and against perturbed inputs.

The operator alone is an ensemble of one member, whose CRPS is its absolute error. All rows of a
table see the same trajectories and leads; members and energies are means before ratios are formed.
"""

import functools
import math

import torch

from ups.eval.ensemble import ROWS, corrected, member_noise, perturbed
from ups.eval.finish import LEADS
from ups.eval.measure import CHUNK_BYTES, by_trajectory
from ups.eval.metrics import (
    DEFINITIONS,
    crps,
    nrmse,
    ratio,
    spectrum,
    spectrum_error,
    spread_skill,
)
from ups.eval.plots import draw_ensemble, picture
from ups.train.step import exact_inference

SIZES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of perturbed inputs, shares of a field's deviation
VAL = {"members": 8, "calls": 8, "leads": (1, 5, 20, 40), "limit": 64}  # cheap, in training


BLOCKS = {"crps": "CRPS (of the operator alone: its absolute error)",
          "nrmse_mean": "nRMSE of the ensemble mean", "nrmse_sample": "nRMSE of one member",
          "spread_skill": "spread / skill", "spectrum_error": "high-band spectrum error"}


def finish_ensembles(run, operator, correctors, tasks):
    """Test the correctors {label: (corrector, calls)}; print, write `test.json`, draw."""
    results, show, members = {}, run.accelerator.is_main_process, run.cfg.members
    dressing = next(iter(correctors.values()))[0], 0
    for index, task in enumerate(tasks):
        judge = functools.partial(measure_ensemble, run.accelerator, task, index)
        size = tuned_size(judge, operator, task)
        rows = {"operator": (shaken(operator, task, 0.0), 1),
                f"perturbed input, {size:g}": (shaken(operator, task, size), members)}
        rows |= {label: (drawn(operator, corrector, calls, run.cfg), members) for label,
                 (corrector, calls) in ({"dressed, no network": dressing} | correctors).items()}
        leads = [lead for lead in LEADS if lead < task.fields.facts.frames]
        scores = {label: summary(judge("test", draw, count, leads), count)
                  for label, (draw, count) in rows.items()}
        results[task.name] = {"leads": leads, "members": members, "scores": scores}
        last = list(rows.values())[-1][0]
        shown = picture_of(run.accelerator, task, index, last, members)  # every rank
        if show:
            print(table(task, results[task.name]))
            run.write("test.json", {"definition": {name: DEFINITIONS[name] for name in BLOCKS
                                                   if name in DEFINITIONS} | {
                                        "nrmse_mean, nrmse_sample": DEFINITIONS["nrmse"]},
                                    "split": "test", "tasks": results})
            name = "ensemble.png" if len(tasks) == 1 else f"ensemble_{task.name}.png"
            picture(run.folder / name, draw_ensemble, task.fields.facts, 0, *shown,
                    results[task.name])


def val_ratio(accelerator, operator, task, index, corrector, cfg):
    """CRPS on the val split as a share of the operator's absolute error, mean over some leads."""
    judge = functools.partial(measure_ensemble, accelerator, task, index, "val",
                              leads=VAL["leads"], limit=VAL["limit"])
    calls = min(cfg.calls, VAL["calls"])
    ensemble = judge(drawn(operator, corrector, calls, cfg), VAL["members"])
    alone = judge(shaken(operator, task, 0.0), 1)
    return (ensemble["crps"].mean(0) / alone["crps"].mean(0)).mean().item()


def tuned_size(judge, operator, task):
    """The size of perturbed inputs with the least CRPS on the val split."""
    def crps_of(size):
        draw = shaken(operator, task, size)
        return judge("val", draw, VAL["members"], VAL["leads"], VAL["limit"])["crps"].mean().item()

    return min(SIZES, key=crps_of)


def summary(tables, members):
    """Scores by lead time: means over trajectories, then ratios."""
    mean = {name: table.mean(0) for name, table in tables.items()}
    return {"crps": mean["crps"].tolist(), "nrmse_mean": mean["nrmse_mean"].tolist(),
            "nrmse_sample": mean["nrmse_sample"].tolist(),
            "spread_skill": ratio(mean["variance"], mean["square_error"], members).tolist(),
            "spectrum_error": (mean["surplus"] / mean["energy"]).tolist()}


def table(task, result):
    """The scores as text, a block for each."""
    count, leads = len(task.fields.split("test")), result["leads"]
    lines = [f"\n{task.name}: {count} test trajectories from the first frame, "
             f"{result['members']} members",
             " " * 28 + "".join(f"{f'step {lead}':>11}" for lead in leads)]
    for block, title in BLOCKS.items():
        lines.append(title)
        for label, scores in result["scores"].items():
            if label != "operator" or block not in ("spread_skill", "nrmse_sample"):
                values = "".join(f"{value:11.3g}" for value in scores[block])
                lines.append(f"  {label:26}{values}")
    return "\n".join(lines)


def measure_ensemble(accelerator, task, index, split, draw, members, leads=None, limit=None):
    """Scores (n, leads) by name of every trajectory of a split.

    `draw(z0, steps, dt, cond, index, noise, leads=)` yields (lead, members), such as `corrected`
    and `perturbed` with their models bound.
    """
    tables = functools.partial(_tables, accelerator.device, task, index, draw, members, leads)
    spec = task.fields.facts
    size = 4 * len(spec.channels) * math.prod(spec.grid) * (spec.frames + 4 * members)
    return by_trajectory(accelerator, tables, task.fields.split(split)[:limit],
                         max(1, min(16, CHUNK_BYTES // size)))


@exact_inference
@torch.no_grad()
def _tables(device, task, index, draw, members, leads, chosen):
    u = task.fields.read(chosen).to(device)  # (B, T, C, *grid)
    last, scores = u.shape[1] - 1, []
    leads = leads and [lead for lead in leads if lead <= last]
    for lead, z in ensemble_of(task, index, draw, members, u, chosen, leads):
        p, y = task.decode(z), u[:, lead]
        variance, square_error = spread_skill(p if members > 1 else torch.cat([p, p], 1), y)
        energy = torch.stack([spectrum(member[:, None]) for member in p.unbind(1)]).mean(0)
        surplus, true = spectrum_error(energy, spectrum(y[:, None]), task.fields.facts.grid)
        sample, mean = (nrmse(x[:, None], y[:, None])[:, 0] for x in (p[:, 0], p.mean(1)))
        scores.append({"crps": crps(p, y).mean(1), "nrmse_sample": sample, "nrmse_mean": mean,
                       "variance": variance.mean(1), "square_error": square_error.mean(1),
                       "surplus": surplus.mean((1, 2)), "energy": true.mean((1, 2))})
    return {name: torch.stack([score[name] for score in scores], 1) for name in scores[0]}


def ensemble_of(task, index, draw, members, u, chosen, leads=None):
    """Start `draw` from the first frames of fields u (B, T, C, *grid)."""
    z0 = task.encode(u[:, 0])
    dt = torch.full((len(u),), task.fields.facts.dt, device=u.device)
    noise = member_noise(0, chosen, members, 2, *z0.shape[1:]).to(u.device)
    return draw(z0, u.shape[1] - 1, dt, task.cond(chosen).to(u.device), index, noise, leads=leads,
                inputs=task.inputs(chosen))


def drawn(operator, corrector, calls, cfg=None, **how):
    """The ensemble that `corrector` draws, in the form that `measure_ensemble` wants.

    `cfg` says how often it corrects and how many members go through the network at a time.
    """
    every, rows = (cfg.correct_every, cfg.micro_batch or ROWS) if cfg else (1, ROWS)

    def draw(z0, steps, dt, cond, task, noise, leads, inputs=None):
        return corrected(operator, corrector, z0, steps, dt, cond, task, noise, calls,
                         every, leads, rows, inputs, **how)

    return draw


def shaken(operator, task, size):
    """The ensemble of perturbed inputs: white noise on the grid, `size` of a field's deviation."""
    def draw(z0, steps, dt, cond, index, noise, leads, inputs=None):
        scale = task.noise_scale.to(z0) * size
        return perturbed(operator, z0, steps, dt, cond, index, noise[:, :, 0], scale, leads, inputs)

    return draw


@torch.no_grad()
def picture_of(accelerator, task, index, draw, members):
    """Fields (T, C, *grid) and members (T, M, C, *grid) of the first test trajectory."""
    chosen = task.fields.split("test")[:1]
    u = task.fields.read(chosen).to(accelerator.device)
    frames = [task.decode(z)[0] for _, z in ensemble_of(task, index, draw, members, u, chosen)]
    first = u[:1, 0].expand(members, *u.shape[2:])
    return u[0].cpu(), torch.stack([first, *frames]).cpu()
