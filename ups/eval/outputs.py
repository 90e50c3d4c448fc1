"""What an evaluation leaves: metrics.json, metrics.csv and report.html, all of them or none.

metrics.csv has a line `# name: ...` for every definition, then the columns task, forecast, metric,
channel (or `mean`), lead (or `all`), value, low, high: the last two are the 95 % interval.
"""

import csv
import io
import json
import math

from ups.eval.finish import LEADS
from ups.eval.forecasts import LABELS, PROBES
from ups.eval.page import page


def write_outputs(folder, about, pictures):
    """Print the main table and write all files (main process).

    Under other names first, so that earlier reports survive a failure.
    """
    print(headline(about))
    about = clean(about)
    texts = {"metrics.json": json.dumps(about, indent=1, allow_nan=False) + "\n",
             "metrics.csv": as_csv(about), "report.html": page(about, pictures)}
    folder.mkdir(exist_ok=True)
    partial = {name: folder / f"{name}.partial" for name in texts}
    try:
        for name, text in texts.items():
            partial[name].write_text(text)
        for name, path in partial.items():
            path.replace(folder / name)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    print(f"report: {folder / 'report.html'}")


def clean(value):
    """Plain JSON: None for what is not finite."""
    if isinstance(value, dict):
        return {key: clean(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_csv(results):
    out = io.StringIO()
    for name, text in results["definitions"].items():
        out.write(f"# {name}: {text}\n")
    write = csv.writer(out, lineterminator="\n").writerow
    write(["task", "forecast", "metric", "channel", "lead", "value", "low", "high"])
    for task, result in results["tasks"].items():
        out.write(f"# {task}: {result['protocol']}\n")
        for forecast, about in result["forecasts"].items():
            for metric, score in about["scores"].items():
                for channel, one in {"mean": score, **score.get("by_channel", {})}.items():
                    head, empty = [task, forecast, metric, channel], [""] * result["steps"]
                    write([*head, "all", one["all"], *one.get("interval", ("", ""))])
                    for k, value in enumerate(one.get("by_lead", ())):
                        bounds = [one.get(end, empty)[k] for end in ("low", "high")]
                        write([*head, k + 1, value, *bounds])
    return out.getvalue()


def headline(about):
    """The main table as text."""
    lines = []
    for task, result in about["tasks"].items():
        leads = [lead for lead in LEADS if lead <= result["steps"]]
        lines += [f"\n{task}: test nRMSE of {result['trajectories']} trajectories, "
                  f"{result['protocol']}",
                  f"{'':20}" + "".join(f"{f'step {lead}':>11}" for lead in leads)
                  + f"{'all steps':>11}   {'95 % interval':23}{'CRPS':>9}"]
        for name in LABELS:
            if name in result["forecasts"] and name not in PROBES:
                score, crps = (result["forecasts"][name]["scores"][m] for m in ("nrmse", "crps"))
                values = [score["by_lead"][lead - 1] for lead in leads] + [score["all"]]
                low, high = score["interval"]
                lines.append(f"{LABELS[name]:20}" + "".join(f"{v:11.2e}" for v in values)
                             + f"   {f'{low:.2e} to {high:.2e}':23}{crps['all']:9.2e}")
    if about["steady"]:
        lines.append(f"steady prior: the numbers of its own test, {about['run']}/steady/test.json")
    return "\n".join([*lines, f"{about['definitions']['nrmse']}."] if about["tasks"] else lines)
