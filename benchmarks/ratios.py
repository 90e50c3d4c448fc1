"""What benchmarks/accuracy.py prints and draws of a task: the table, the ratios, the picture."""

import torch

from ups.eval.metrics import interval, resamplings
from ups.eval.plots import picture


def report(task, results, out):
    """The table of a task, the ratio to the best baseline, and the picture."""
    first = min(results.values(), key=lambda r: len(r["tasks"]))
    scores = {model: r["scores"][task] for model, r in results.items()}
    count, leads = (len(first["scores"][task][key]) for key in ("rollout", "by_lead"))
    weights = resamplings(count)
    data = " ".join(f"{key}={value}" for key, value in first["data"][task].items())
    print(f"\n{task} ({data}), {first['seconds']:g} s of training each, {first['device']}, "
          f"seed {first['seed']}, {first['at']}\nnRMSE over {count} {first['split']} trajectories, "
          f"roll-out of {leads} steps from the first frame, 95 % intervals\n(compile: seconds "
          "before the first step, beside the other models, not counted; ms: of a step)")
    width = max(len(model) for model in results)
    print(f"{'':{width}} {'params':>10} {'compile':>7} {'batch':>5} {'steps':>7} {'ms':>5} "
          f"{'one step':>9}  {'interval':19} {'roll-out':>9}  interval")
    for model, r in results.items():
        compiled = r.get("compile_s", torch.nan)  # older results lack it
        row = f"{model:{width}} {r['parameters']:10,} {compiled:7.0f} {r['batch_size']:5} "
        row += f"{r['steps']:7,} {r['step_ms']:5.2f}"
        for name in ("one_step", "rollout"):
            values = torch.tensor(scores[model][name], dtype=torch.float64)
            low, high = interval(weights @ values)
            row += f" {values.mean():9.2e}  [{low:.2e}, {high:.2e}]"
        print(row)
    for model, r in results.items():
        if r["curve"][-1][0] > 1.1 * r["seconds"]:
            print(f"{model}: {r['steps']} steps, the fewest, take {r['curve'][-1][0]:.2g} s.")
    codes = {model: f"{r.get('code') or 'unknown'} ({r['at']})" for model, r in results.items()}
    if len(set(codes.values())) > 1:
        print("of several commits: " + ", ".join(f"{m} {code}" for m, code in codes.items()))
    if first["device"] == "CPU":
        print("The settings are those for 100 s on a GPU; a CPU tries the command, not the models.")
    means = {m: torch.tensor(s["rollout"], dtype=torch.float64) for m, s in scores.items()}

    def compare(model, other):
        ratios = (weights @ means[model]) / (weights @ means[other])
        low, high = interval(ratios)
        print(f"roll-out of {model} / {other}: {means[model].mean() / means[other].mean():.2f} "
              f"[{low:.2f}, {high:.2f}]")

    alone = {m: r for m, r in results.items() if len(r["tasks"]) == 1}
    ours = [model for model, r in alone.items() if r["kind"] == "operator"]
    theirs = [model for model in alone if model not in ours]
    for model in [model for model in theirs if not means[model].isfinite().all()]:
        print(f"{model}: some roll-outs overflow; no ratio to it.")
        theirs.remove(model)
    for model in ours if theirs else []:
        compare(model, min(theirs, key=lambda m: means[m].mean()))
    for model in results.keys() - alone.keys():
        for other in ours:
            compare(model, other)
    if alone:
        end = "" if first["split"] == "test" else f"_{first['split']}"
        end += f"_seed{first['seed']}" if first["seed"] else ""
        picture(out / f"{task}_{first['seconds']:g}s{end}.png", draw, task, alone)


def draw(figure, task, results):
    """Validation error against training time, and error against lead time."""
    figure.set_size_inches(11, 4.2)
    left, right = figure.subplots(1, 2)
    for model, r in results.items():
        label = f"{model} ({r['parameters'] / 1e6:.2g} M)"
        left.plot(*zip(*r["curve"], strict=True), marker="o", ms=4, lw=1.8, label=label)
        by_lead = r["scores"][task]["by_lead"]
        leads = range(1, len(by_lead) + 1)
        right.plot(leads, by_lead, lw=1.8, marker="o" if len(leads) < 2 else "", label=label)
    left.set(xlabel="seconds of training", ylabel="nRMSE of the roll-out, val", yscale="log",
             title="error against training time", xlim=(0, None))
    first = next(iter(results.values()))
    right.set(xlabel="step of the roll-out", ylabel=f"nRMSE, {first['split']}", yscale="log",
              title="error against lead time")
    for axis in (left, right):
        axis.grid(alpha=0.3, which="both", lw=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    figure.suptitle(f"{task}, {first['seconds']:g} s of training each, {first['device']}, "
                    f"seed {first['seed']}")
