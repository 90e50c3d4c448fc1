"""What benchmarks/accuracy.py prints and draws of a task: the table, the ratios, the picture."""

import math

import torch

from benchmarks.tables import heading, row
from ups.eval.metrics import interval, resamplings
from ups.eval.plots import picture


def report(task, results, out):
    """The table of a task, the ratio to the best baseline, and the picture."""
    first = next(iter(results.values()))
    means = {model: {name: torch.tensor(r["scores"][name], dtype=torch.float64)
                     for name in ("one_step", "rollout")} for model, r in results.items()}
    count, leads = (len(first["scores"][key]) for key in ("rollout", "by_lead"))
    weights = resamplings(count)
    about = " ".join(f"{key}={value}" for key, value in first["data"].items())
    title = f"{task}, {first['seconds']:g} s of training each, {first['device']}"
    end = f", seed {first['seed']}, {first['at']}"
    heading(f"{title}{end} ({about})\nnRMSE of {count} {first['split']} trajectories: one step "
            f"from each true frame; {leads} steps from the first one, with 95 % bootstrap "
            "intervals over trajectories", "model", "parameters", "batch", "steps", "ms a step",
            "one step", "roll-out", "interval")
    for model, r in results.items():
        rolled = means[model]["rollout"]
        low, high = interval(weights @ rolled)
        row(model, f"{r['parameters']:,}", r["batch_size"], f"{r['steps']:,}",
            f"{r['step_ms']:.2f}", f"{means[model]['one_step'].mean():.2e}",
            f"{rolled.mean():.2e}", f"[{low:.2e}, {high:.2e}]")
    print()
    for model, r in results.items():
        if r["curve"][-1][0] > 1.1 * r["seconds"]:
            print(f"{model}: {r['steps']} steps, the fewest, take {r['curve'][-1][0]:.2g} s.")
    if first["device"] == "CPU":
        print("The settings are those for 100 s on a GPU; a CPU tries the command, not the models.")
    ours = [model for model, r in results.items() if r["kind"] == "operator"]
    theirs = {model: means[model]["rollout"] for model in results if model not in ours}
    for model in [model for model, errors in theirs.items() if not errors.isfinite().all()]:
        print(f"{model}: some roll-outs overflow; no ratio to it.")
        theirs.pop(model)
    for model in ours if theirs else ():
        best = min(theirs, key=lambda name: theirs[name].mean())
        errors = means[model]["rollout"]
        low, high = interval((weights @ errors) / (weights @ theirs[best]))
        print(f"roll-out of {model} / {best}: {errors.mean() / theirs[best].mean():.2f} "
              f"[{low:.2f}, {high:.2f}]")
    name = f"{task}_{first['seconds']:g}s_{first['split']}_seed{first['seed']}.png"
    picture(out / name, draw, title + end, results)


def summary(tables):
    """The roll-out errors of all tasks, and their geometric mean as a share of the first one's."""
    models = list(dict.fromkeys(model for results in tables.values() for model in results))
    heading("roll-out nRMSE", "model", *tables, "mean")
    for model in models:
        errors = [mean_of(results.get(model)) for results in tables.values()]
        shares = [e / mean_of(results.get(models[0]))
                  for e, results in zip(errors, tables.values(), strict=True)]
        mean = math.exp(sum(map(math.log, shares)) / len(shares))
        row(model, *[f"{e:.2e}" for e in errors], f"{mean:.3f}")


def mean_of(result):
    """The mean roll-out error of a result; nan where there is none."""
    errors = result["scores"]["rollout"] if result else [math.nan]
    return sum(errors) / len(errors)


def draw(figure, title, results):
    """Validation error against training time, and error against lead time."""
    figure.set_size_inches(11, 4.2)
    left, right = figure.subplots(1, 2)
    for model, r in results.items():
        label = f"{model} ({r['parameters'] / 1e6:.2g} M)"
        left.plot(*zip(*r["curve"], strict=True), marker="o", ms=4, lw=1.8, label=label)
        errors = r["scores"]["by_lead"]
        right.plot(range(1, len(errors) + 1), errors, lw=1.8, marker="o" * (len(errors) < 2))
    left.set(xlabel="seconds of training", ylabel="nRMSE of the roll-out, val", yscale="log",
             title="error against training time", xlim=(0, None))
    right.set(xlabel="step of the roll-out", ylabel=f"nRMSE, {r['split']}", yscale="log",
              title="error against lead time")
    for axis in (left, right):
        axis.grid(alpha=0.3, which="both", lw=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.suptitle(title)
