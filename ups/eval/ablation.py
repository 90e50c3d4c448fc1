"""What the runs of an ablation say: one line for each, and a table of means over seeds.

A run's score is its best validation score, that of the weights it has kept. Ranking uses nothing
else; the test score of the same weights stands beside it.
"""

import csv
import math
import statistics

from ups.files import read_json
from ups.train.tracking import Metrics

SCORES = ("val/nrmse_rollout", "val/nrmse", "val/crps_ratio")  # of operator, codec, correctors


def result(run):
    """Status, reason and scores of the one stage that was trained in the folder `run`."""
    about = dict(status="new", reason="", val=math.nan, test=math.nan, seconds=math.nan)
    about |= read_json(run / "cell.json")
    for end in [*run.glob("*/exit.json"), *run.glob("*/*/exit.json")]:
        if not (end.parent.is_symlink() or end.parent.parent.is_symlink()):
            lines = Metrics(end.with_name("metrics.jsonl")).read()
            key = next((key for key in SCORES if any(key in line for line in lines)), "val")
            values = [line[key] for line in lines if math.isfinite(line.get(key, math.nan))]
            return about | read_json(end) | {"score": key, "val": min(values, default=math.nan),
                                             "test": test_score(end.with_name("test.json"))}
    if (run / "log.txt").exists():  # it ended before training began
        words = (run / "log.txt").read_text().strip().splitlines() or ["no output"]
        reason = [line for line in words if line.startswith("error:")] or words
        about |= {"status": "failed", "reason": reason[-1].removeprefix("error: ")}
    return about


def test_score(path):
    """What test.json says of the quantity that validation measures, over tasks as it does: of
    errors the geometric mean, of shares of the operator's the mean."""
    tasks, shares = read_json(path).get("tasks", {}).values(), []
    for rows in (task["scores"].values() for task in tasks if "scores" in task):
        alone, *_, last = (row["crps"] for row in rows)
        shares.append(statistics.mean(a / b for a, b in zip(last, alone, strict=True)))
    if shares or not tasks:
        return statistics.mean(shares or [math.nan])
    return math.prod(task.get("nrmse_grid") or task.get("nrmse_members")  # of a codec, steady prior
                     or task["nrmse_rollout"]["operator"] for task in tasks) ** (1 / len(tasks))


def table(cells):
    """Markdown: the flags that differ, then mean [least, most] over seeds, best first."""
    keys = [key for key in cells[0].choice if len({cell.choice[key] for cell in cells}) > 1]
    keys = keys or list(cells[0].choice)
    groups, rows, score = {}, [], "val"
    for cell in cells:
        groups.setdefault(tuple(cell.choice.values()), []).append(cell)
    for members in groups.values():
        done = [one for cell in members if (one := result(cell.run))["status"] == "done"]
        score = done[0]["score"] if done else score
        spans = [_span([one[name] for one in done]) for name in ("val", "test", "seconds")]
        steps = "/".join(sorted({str(one["step"]) for one in done})) or "-"
        rows.append((statistics.mean([one["val"] for one in done] or [math.inf]),
                     [*(members[0].choice[key] for key in keys), f"{len(done)} of {len(members)}",
                      steps, *spans]))
    lines = [[*keys, "runs", "steps", score, "test", "seconds"],
             *(row for _, row in sorted(rows, key=lambda row: row[0]))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _span(values):
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else "-"
    return f"{statistics.mean(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


def write_csv(path, cells):
    """One line for each run."""
    columns = ("status", "val", "test", "step", "seconds", "reason")
    with open(path, "w", newline="") as file:
        write = csv.writer(file, lineterminator="\n").writerow
        write(["run", *cells[0].choice, "seed", *columns])
        for cell in cells:
            about = result(cell.run)
            write([cell.run, *cell.choice.values(), cell.config["seed"],
                   *(about.get(column, "") for column in columns)])
