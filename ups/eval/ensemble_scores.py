"""Judge ensembles in physical units, beside the operator and two yardsticks without a network.

A generator's score on val is its CRPS as a share of the operator's absolute error, mean over the
leads. Each stage writes its own to `choices.json`, so that a run can say which generator to prefer.
"""

import math

import h5py
import torch

from ups.eval.ensemble import drawn, dressed
from ups.eval.forecasts import make_forecasts, scored, start
from ups.eval.measure import by_trajectory, measure, summarise, text_table
from ups.eval.metrics import DEFINITIONS, block_means, spectrum
from ups.eval.plots import draw_ensemble, picture
from ups.files import read_json, write_json
from ups.stages import load_generator
from ups.train.step import exact_inference

SIZES = (0.001, 0.003, 0.01, 0.03, 0.1)  # of perturbed inputs, in deviations of a field
STRENGTHS = (1.0, 0.7, 0.5, 0.35, 0.2)  # of a step's noise: less where all steps err alike
VAL, MEMBERS = 16, 4  # trajectories and members that choose: cheap, and fair for any number
TEST = 16  # trajectories of a stage's own table; evaluate.py takes all
SCORES = ("nrmse", "vrmse", "sample_nrmse", "crps", "crps_block", "energy_score", "spread_skill",
          "coverage_50", "coverage_90", "spectrum_error")
TRUTH = {"mean": "error of the mean / true spread", "spread": "spread / true spread",
         "crps": "CRPS / the truth's own", "crps_block": "CRPS of 8 x 8 means / the truth's own",
         "energy": "energy above k = n / 5 / the truth's"}


def val_score(accelerator, operator, generator, task, index):
    """CRPS on val as a share of the operator's absolute error, mean over the leads."""
    forecasts = {"operator": make_forecasts(task, index, operator)["operator"],
                 "ensemble": drawn(generator, task, index, MEMBERS)}
    tables, _ = measure(accelerator, task, forecasts, task.fields.split("val")[:VAL],
                        only=("crps",), members=MEMBERS)
    ours, alone = (tables[name]["crps"].mean((0, 2)) for name in ("ensemble", "operator"))
    score = (ours / alone.clamp(min=1e-30)).mean().item()
    return score if math.isfinite(score) else 1e30


def validate_ensemble(run, operator, generator, tasks):
    """The score of each task, and their mean."""
    scores = {task.name: val_score(run.accelerator, operator, generator, task, index)
              for index, task in enumerate(tasks)}
    more = {f"val/{name}/crps_ratio": score for name, score in scores.items() if len(tasks) > 1}
    return {"val/crps_ratio": sum(scores.values()) / len(scores)} | more


def choose(run, operator, generator, tasks, **options):
    """For each task what scores best on val goes to the generator and to `choices.json`.

    `options`: the values of an attribute for each task; one attribute is chosen after the other,
    beginning with all at their first values. Every rank calls.
    """
    path = run.folder / "choices.json"
    chosen = read_json(path)
    for name, values in options.items():
        setattr(generator, name, [one[0] for one in values])
    for index, task in enumerate(tasks):
        scores, best = {}, ()
        for name, values in options.items():
            for value in values[index]:
                getattr(generator, name)[index] = value
                key = tuple(getattr(generator, other)[index] for other in options)
                if key not in scores:
                    scores[key] = val_score(run.accelerator, operator, generator, task, index)
            best = min(scores, key=scores.get)
            for other, value in zip(options, best, strict=True):
                getattr(generator, other)[index] = value
        chosen.setdefault(task.name, {}).update(zip(options, best, strict=True),
                                                crps_ratio=scores[best])
    if run.accelerator.is_main_process:
        write_json(path, chosen)


def finish_ensembles(run, operator, generators, tasks):
    """Choose and test generators {label: generator}, the last one that of this stage, beside the
    yardsticks; print, write `test.json`, draw. `operator` (Loaded) with what it chose."""
    results, members = {}, run.cfg.members
    perturbed = load_generator(run.cfg.run, "operator", operator).model
    generator, operator = list(generators.values())[-1], operator.model
    choose(run, operator, generator, tasks, strength=[STRENGTHS] * len(tasks),
           perturbation=[(0.0, size) for size in perturbed.perturbation])
    for index, task in enumerate(tasks):
        test = task.fields.split("test")[:TEST]
        forecasts = {"operator": make_forecasts(task, index, operator)["operator"],
                     "dressing (no network)": dressed(operator, task, index,
                                                      run.accelerator.device, members),
                     f"perturbed input, {perturbed.perturbation[index]:g}":
                         drawn(perturbed, task, index, members)}
        forecasts |= {label: drawn(generator, task, index, members)
                      for label, generator in generators.items()}
        tables, milliseconds = measure(run.accelerator, task, forecasts, test, only=SCORES,
                                       members=members)
        tables.pop("truth", None)
        scores = {name: summarise(table, tables["operator"], scored(task),
                                  1 if name == "operator" else members)["scores"]
                  for name, table in tables.items()}
        count = {name: 1 if name == "operator" else members for name in tables}
        results[task.name] = {"trajectories": len(test), "members": members, "scores": scores,
                              "milliseconds": {name: milliseconds[name] / count[name]
                                               for name in tables}}
        truth, shown = futures(run.accelerator, task, forecasts[list(forecasts)[-1]], test)
        if run.accelerator.is_main_process:
            print(table_of(task.name, results[task.name]))
            name = "ensemble.png" if len(tasks) == 1 else f"ensemble_{task.name}.png"
            picture(run.folder / name, draw_ensemble, scored(task), truth, shown)
    if run.accelerator.is_main_process:
        run.write("test.json", {"definition": {name: DEFINITIONS[name] for name in
                                               ("nrmse", "vrmse", "crps", "spread_skill")},
                                "split": "test", "tasks": results})


COLUMNS = {"nrmse": "nRMSE", "vrmse": "VRMSE", "crps": "CRPS", "crps_block": "of blocks",
           "energy_score": "of fields", "spread_skill": "spread", "coverage_50": "in 50 %",
           "coverage_90": "in 90 %", "spectrum_error": "spectrum"}


def table_of(name, result):
    """Means over all leads, and CRPS at some, as text."""
    rows = {label: [*(scores.get(key, {}).get("all") for key in COLUMNS),
                    result["milliseconds"][label]] for label, scores in result["scores"].items()}
    return text_table(f"{name}: {result['trajectories']} test trajectories, {result['members']} "
                      "members, mean over all leads", [*COLUMNS.values(), "ms/member"], rows, 26,
                      ".3g")


@exact_inference
@torch.no_grad()
def futures(accelerator, task, forecast, test):
    """Fields (T, *grid) and members (T, M, *grid) of the first channel and test trajectory."""
    s = start(task, test[:1], test, accelerator.device)
    frames = [p[0, :, 0] for p in forecast(s)]
    return s.u[0, :, 0].cpu(), torch.stack([s.u[0, :1, 0].expand_as(frames[0]), *frames]).cpu()


# against the truth of a stochastic task
def truth_of(task):
    """The file with continuations of a task's test states, or None: it is of full resolution, and
    begins at the first frame."""
    fields, path = task.fields, task.fields.files[0].path.with_suffix(".truth")
    whole = fields.stride_x == fields.frames.step == len(fields.files) == task.history == 1
    first = fields.frames.start == fields.files[0].facts.first_frame
    return path if whole and first and path.is_file() else None


@exact_inference
@torch.no_grad()
def against_truth(accelerator, task, path, forecasts, block=8):
    """{forecast: {measure: (leads,)}} against the solver's own continuations of some states.

    mean       error of the mean / true spread      variance     spread / true spread
    crps       CRPS / the truth's own               crps_block   the same of means over blocks
    energy     of a member at k > n / 5 / the truth's, on n points an axis
    """
    high = min(task.fields.facts.grid) // 5
    with h5py.File(path) as f:
        chosen, leads = torch.from_numpy(f["trajectory"][:]), f["lead"][:].tolist()
        place = {n: i for i, n in enumerate(chosen.tolist())}

        def sums(part):
            s = start(task, part, chosen, accelerator.device)
            s.steps = leads[-1]
            truth = {k: torch.stack([torch.from_numpy(f["u"][place[int(n)], i]) for n in part])
                     for i, k in enumerate(leads)}
            return {(name, what): values[None] for name, forecast in forecasts.items()
                    for what, values in against(forecast(s), truth, s.u.device, block,
                                                high).items()}

        tables = by_trajectory(accelerator, sums, chosen, 1)
    results = {}
    for name in forecasts:
        mean = {what: table.mean(0) for (other, what), table in tables.items() if other == name}
        results[name] = {what: (mean[what] / mean[f"true_{what}"]).tolist()
                         for what in ("crps", "crps_block", "energy")} | {
            "mean": (mean["mean"].clamp(min=0) / mean["true_variance"]).sqrt().tolist(),
            "spread": (mean["variance"] / mean["true_variance"]).sqrt().tolist()}
    return {"leads": leads, "scores": results}


def against(frames, truth, device, block, high):
    """{measure: (leads,)} of members and true ones {lead: (1, M, C, *grid)}, to be averaged over
    states: `mean` is the squared error of the mean, less what finitely many members add to it."""
    rows = {}
    for k, p in enumerate(frames, start=1):
        if k not in truth:
            continue
        p, y = p.to(device).double(), truth[k].to(device).double()
        one, other = (x.var(1).mean() if x.shape[1] > 1 else x.new_zeros(()) for x in (p, y))
        row = {"variance": one, "true_variance": other,
               "mean": (p.mean(1) - y.mean(1)).square().mean() - one / p.shape[1]
               - other / y.shape[1]}
        for end, a, b in (("", p, y), ("_block", block_means(p, block), block_means(y, block))):
            own = _pairs(b) / (b.shape[1] * (b.shape[1] - 1))
            within = _pairs(a) / max(1, a.shape[1] * (a.shape[1] - 1))
            row |= {f"crps{end}": _between(a, b) - within, f"true_crps{end}": own}
        for name, x in (("energy", p), ("true_energy", y)):
            row[name] = spectrum(x)[..., high + 1:].sum(-1).mean()
        for what, value in row.items():
            rows.setdefault(what, []).append(value)
    return {what: torch.stack(values) for what, values in rows.items()}


def _between(x, y):
    """Mean |x_i - y_j| over pairs of a member of x and one of y (1, M, ..)"""
    return (_pairs(torch.cat([x, y], 1)) - _pairs(x) - _pairs(y)) / (x.shape[1] * y.shape[1])


def _pairs(x):
    """Sum of |x_i - x_j| over pairs i < j, mean over the other axes"""
    place = torch.arange(1 - x.shape[1], x.shape[1], 2, dtype=x.dtype, device=x.device)
    return torch.tensordot(place, x.sort(1).values, ([0], [1])).mean()
