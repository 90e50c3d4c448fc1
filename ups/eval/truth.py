"""Judge forecasts against the solver's own ensemble, where the noise of a task is real: a file
`.truth` beside the data holds continuations of some states by the solver (ups/data/stochastic.py).
"""

import torch

from ups.data.stores import opened
from ups.eval.forecasts import start
from ups.eval.measure import by_trajectory
from ups.eval.metrics import block_means, pairs, spectrum
from ups.train.step import exact_inference

BLOCK = 8  # points an axis
TRUTH = {"mean": "error of the mean / true spread", "spread": "spread / true spread",
         "crps": "CRPS / the truth's own", "crps_block": "CRPS of 8 x 8 means / the truth's own",
         "energy": "energy above k = n / 5 / the truth's"}


def truth_of(task):
    """The file with continuations of a task's test states, or None: it is of full resolution, and
    begins at the first frame."""
    fields, path = task.fields, task.fields.files[0].path.with_suffix(".truth")
    whole = fields.stride_x == fields.frames.step == len(fields.files) == task.history == 1
    first = fields.frames.start == fields.files[0].facts.first_frame
    return path if whole and first and path.is_file() else None


@exact_inference
def against_truth(accelerator, task, path, forecasts):
    """{"leads": .., "scores": {forecast: {a measure of TRUTH: values at the leads}}}"""
    high = min(task.fields.facts.grid) // 5
    with opened(path) as f:
        chosen, leads = torch.from_numpy(f["trajectory"][:]), f["lead"][:].tolist()

    def tables(part):  # of one state
        with opened(path) as f:
            truth = torch.from_numpy(f["u"][chosen.tolist().index(part[0])])
        s, rows = start(task, part, chosen, accelerator.device), {}
        s.steps = leads[-1]
        for name, forecast in forecasts.items():
            for k, p in enumerate(forecast(s), start=1):
                if k in leads:
                    y = truth[leads.index(k)].to(p)
                    for what, pair in compare(p[0].double(), y.double(), high).items():
                        rows.setdefault((name, what), []).append(torch.stack(pair))
        return {key: torch.stack(pairs)[None] for key, pairs in rows.items()}

    scores = {name: {} for name in forecasts}
    for (name, what), table in by_trajectory(accelerator, tables, chosen, 1).items():
        ours, true = table.mean(0).unbind(1)  # (leads,)
        ratio = ours / true
        scores[name][what] = (ratio.clamp(min=0).sqrt() if what in ("mean", "spread")
                              else ratio).tolist()
    return {"leads": leads, "scores": scores}


def compare(p, y, high):
    """{measure: (of members p (M, C, *grid), of true ones y (K, C, *grid))} of a state at a lead.

    Means over states come before the ratios, and before the roots of `mean` and `spread`, which
    are squares here. From the error of the mean is taken what finitely many members add to it.
    """
    m, k = len(p), len(y)
    ours, true = p.var(0, correction=min(1, m - 1)).mean(), y.var(0).mean()
    error = (p.mean(0) - y.mean(0)).square().mean()
    found = {"mean": (error - ours / m - true / k, true), "spread": (ours, true),
             "energy": tuple(spectrum(x[None])[..., high + 1:].sum(-1).mean() for x in (p, y))}
    blocks = (block_means(x[None], BLOCK)[0] for x in (p, y))
    for name, (a, b) in {"crps": (p, y), "crps_block": blocks}.items():
        every, within, own = (pairs(x[None]).mean() for x in (torch.cat([a, b]), a, b))
        found[name] = ((every - within - own) / (m * k) - within / max(1, m * (m - 1)),
                       own / (k * (k - 1)))
    return found
