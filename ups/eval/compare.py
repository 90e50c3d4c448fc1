"""One table over runs: their numbers, and the fields in which their configurations differ.

Numbers come from RUN/evaluation/metrics.json, or, where a run was not evaluated, from what its
operator left in test.json, which is of the protocol `initial`. The table is printed, and written
beside the first run as compare.html, where a click on a column sorts by it.
"""

from html import escape
from pathlib import Path
from string import Template

from ups.config import UsageError
from ups.eval.charts import number, table
from ups.eval.forecasts import LABELS
from ups.eval.protocol import FOLDERS
from ups.eval.style import PAGE, SCRIPT, STYLE
from ups.files import read_json, write_text
from ups.train.systems import RunConfig

COLUMNS = {("operator", "nrmse"): "nRMSE", ("one_step", "nrmse"): "one true step",
           ("operator", "vrmse"): "VRMSE", ("operator", "drift"): "drift",
           ("guarded", "nrmse"): "guarded nRMSE", ("operator", "crps"): "absolute error",
           **{(stage, metric): f"{LABELS[stage]} {name}" for stage in ("diffusion", "consistency")
              for metric, name in (("nrmse", "nRMSE"), ("crps", "CRPS"),
                                   ("spread_skill", "spread / skill"))},
           ("persistence", "nrmse"): "persistence"}


def compare(runs, folder="evaluation"):
    """Print the table and write compare.html."""
    if len(set(runs)) < 2:
        raise UsageError("--compare needs at least two runs, as in --compare runs/A runs/B.")
    rows, settings = [], {}
    for run in dict.fromkeys(runs):
        numbers, settings[run] = read_run(Path(run), folder)
        rows += [{"run": run, "task": task, **row} for task, row in numbers.items()]
    names = sorted({name for values in settings.values() for name in values})
    differ = [name for name in names  # among the runs that have that stage
              if len({str(values[name]) for values in settings.values() if name in values}) > 1]
    for row in rows:
        row |= {name: settings[row["run"]].get(name) for name in differ}
    known = ["run", "task", "nRMSE", *(name for name in differ if ": " not in name),
             *list(COLUMNS.values())[1:], "ms", *(name for name in differ if ": " in name)]
    head = [name for name in known if any(row.get(name) is not None for row in rows)]
    print(as_text(head, rows))
    path = Path(runs[0]).parent / "compare.html"
    write_text(path, as_page(head, rows, differ))
    print(f"\nnRMSE and the like: means over trajectories and all steps of the test split; their "
          f"definitions are in the metrics.json of what was evaluated. Sortable: {path}")


def read_run(run, folder):
    """{task: {column: value}} and the flat configuration of a run."""
    if not run.is_dir():
        raise UsageError(f"there is no run {run}.")
    about, test = read_json(run / folder / "metrics.json"), run / "operator" / "test.json"
    rows, model = {}, read_json(run / "operator" / "model" / "config.json")
    mark = about.get("lineage", {}).get("operator", {}).get("fingerprint")
    if about and mark != model.get("fingerprint"):
        raise UsageError(f"{run / folder} is of another operator than the one in {run}; run "
                         f"`accelerate launch evaluate.py --run {run}` again.")
    if about:
        for task, result in about["tasks"].items():
            rows[task] = {column: result["forecasts"][name]["scores"].get(metric, {}).get("all")
                          for (name, metric), column in COLUMNS.items()
                          if name in result["forecasts"]}
            rows[task]["ms"] = result["forecasts"]["operator"]["milliseconds"]
    alike = not about and folder == FOLDERS["initial"]  # as a stage tests itself
    for task, result in (read_json(test).get("tasks", {}) if alike else {}).items():
        rows[task] = {"nRMSE": result["nrmse_rollout"]["operator"],
                      "one true step": result["nrmse_1"],
                      "persistence": result["nrmse_rollout"]["persistence"],
                      "drift": result.get("conservation_drift")}
    if not rows:
        raise UsageError(f"{run} has no numbers of an operator yet; train one, then run "
                         f"`accelerate launch evaluate.py --run {run}`.")
    skipped = vars(RunConfig()).keys() - {"data"} | {"tasks"}
    settings = {}
    for path in sorted(run.glob("*/config.json")):
        prefix = "" if path.parent.name == "operator" else f"{path.parent.name}: "
        settings |= {prefix + key: value for key, value in read_json(path).items()
                     if key not in skipped}
    settings |= {f"evaluation: {key}": value for key, value in about.get("evaluation", {}).items()
                 if key in ("trajectories", "members", "calls", "guards", "seed")}
    return rows, settings


def show(value):
    if isinstance(value, list):
        return " ".join(map(str, value))
    text = number(value) if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("&ndash;", "-")


def as_text(head, rows):
    cells = [head] + [[show(row.get(name)) for name in head] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(f"{cell:<{width}}" if i < 2 else f"{cell:>{width}}" for i, (cell, width)
                       in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    return "\n".join(lines)


def as_page(head, rows, differ):
    cells = [[escape(show(row.get(name))) for name in head] for row in rows]
    text = (f"They differ in {', '.join(differ)}." if differ else
            "Their configurations do not differ.")
    body = (f"<p>Test split, means over trajectories and all steps; milliseconds of one step of "
            f"one trajectory. {escape(text)} A click on a column sorts by it.</p>"
            f"{table(map(escape, head), cells, 'sortable')}")
    return Template(PAGE).substitute(title=f"{len(rows)} runs", style=STYLE, script=SCRIPT,
                                     body=body)
