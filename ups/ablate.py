"""Quick ablations: train a grid of runs one after the other, and compare them in one table.

    python -m ups.ablate train_operator.py --grid model.depth=4,6 lr=8e-3,4e-3 --seeds 2

Further flags go to the script, for all runs. Any script with a `Config` will do. A run is one
process of it in OUT/HASH, where HASH is that of its configuration: the same command again skips
what is finished and resumes what is not. Ctrl-C lets the current run write a checkpoint. A run that
fails is reported, and the others go on. Rows are ranked by the best value of one validation metric,
the lower the better. Test scores enter no choice; they are in each run's test.json.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from ups.config import Parser, UsageError, command, flat, parse
from ups.files import lock_folder, read_json, write_text
from ups.stages import import_file
from ups.train.run import RunConfig
from ups.train.tracking import Metrics

SCORES = ("val/nrmse_rollout", "val/crps_ratio", "val/crps", "val/nrmse")  # of the stages
SYSTEMS = vars(RunConfig()).keys() - {"data", "tasks", "axes", "facts"}  # change no result


@dataclasses.dataclass
class Cell:
    choice: dict  # what tells it from the others, such as {"lr": "1e-3"}
    seed: int
    run: Path
    flags: list

    def __str__(self):
        return " ".join(f"{k}={v}" for k, v in (self.choice | {"seed": self.seed}).items())

    def train(self, script):
        """One process of the script, its output in log.txt."""
        self.run.mkdir(parents=True, exist_ok=True)
        env = {"ACCELERATE_MIXED_PRECISION": "no"} | os.environ  # as of a launcher: ends with us
        with open(self.run / "log.txt", "w") as log:  # own session: Ctrl-C comes to us alone
            process = subprocess.Popen([sys.executable, script, *self.flags, "--run", self.run],
                                       env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise


def plan(args, extra):
    """All cells of the grid, each with a configuration that the script accepts."""
    if wrong := [item for item in args.grid if not all(item.partition("="))]:
        raise UsageError(f"--grid {wrong[0]}: it is KEY=VALUE,VALUE, such as lr=1e-3,3e-4.")
    grid = dict(item.partition("=")[::2] for item in args.grid)
    if args.seeds < 1 or len(grid) < len(args.grid):
        raise UsageError("--grid names each key once, and --seeds is at least 1.")
    flags = {flag.removeprefix("--").split("=")[0] for flag in extra if flag.startswith("--")}
    if twice := sorted(flags & {*grid}):
        raise UsageError(f"--{twice[0]} is in the --grid, too; leave one of them out.")
    given = flags | {*grid}
    if given & {"run", "seed", "dry_run"}:
        raise UsageError("--run and --seed are chosen by --out and --seeds, and a --dry_run trains "
                         "nothing; leave them out.")
    config, cells = getattr(import_file(args.script), "Config", None), {}
    if config is None:
        raise UsageError(f"{args.script} has no Config, as a script that trains has.")
    for values in itertools.product(*(values.split(",") for values in grid.values())):
        choice, flags = dict(zip(grid, values, strict=True)), list(extra)
        for key, value in choice.items():
            switch = {"true": [f"--{key}"], "false": [f"--no-{key}"]}
            flags += switch.get(value, [f"--{key}", *value.split()])
        for seed in range(args.seeds):
            mine = [*flags, "--seed", str(seed)]
            about = flat(parse(config, mine))
            science = {key: about[key] for key in about if key not in SYSTEMS}
            text = json.dumps(science | {"script": args.script}, sort_keys=True)
            run = Path(args.out) / hashlib.sha256(text.encode()).hexdigest()[:10]
            cells[run] = Cell(choice, seed, run, mine)
    return list(cells.values())


def result(run, metric=None):
    """Status of a run, its reason, and a metric's name and best value."""
    log, end = run / "log.txt", next(run.rglob("exit.json"), None)
    if end is None:  # it ended before training began, or is new
        words = log.read_text().strip().splitlines() if log.exists() else []
        reasons = [line for line in words if line.startswith("error:")] or words or ["no output"]
        return {"status": "failed", "reason": reasons[-1].removeprefix("error: "),
                "metric": metric, "value": math.nan}
    lines = Metrics(end.with_name("metrics.jsonl")).read()
    known = [key for line in lines for key in line if key.startswith("val/")] or [None]
    if metric and any(known) and metric not in known:
        raise UsageError(f"--metric {metric}: {end.parent} has {', '.join(sorted({*known}))}.")
    metric = metric or next((key for key in SCORES if key in known), known[-1])
    values = [line[metric] for line in lines if math.isfinite(line.get(metric, math.nan))]
    return read_json(end) | {"metric": metric, "value": min(values, default=math.nan)}


def table(cells, metric=None):
    """Markdown: what differs, then mean [least, most] over seeds, best first."""
    keys = [key for key in cells[0].choice if len({cell.choice[key] for cell in cells}) > 1]
    keys, groups, rows, names = keys or list(cells[0].choice), {}, [], set()
    for cell in cells:
        groups.setdefault(tuple(cell.choice.values()), []).append((cell, result(cell.run, metric)))
    for group in groups.values():
        values = [one["value"] for _, one in group if one["status"] == "done"]
        names |= {one["metric"] for _, one in group} - {None}
        span = f"{statistics.mean(values):.4g}" if values else "-"
        if len(values) > 1:
            span += f" [{min(values):.4g}, {max(values):.4g}]"
        rows.append((statistics.mean(values or [math.inf]), [
            *(group[0][0].choice[key] for key in keys), f"{len(values)} of {len(group)}", span]))
    lines = [[*keys, "seeds done", " or ".join(sorted(names)) or "-"], ["---"] * (len(keys) + 2),
             *(row for _, row in sorted(rows, key=lambda row: row[0]))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    noise = "Differences below the spread of seeds are noise"
    noise += "." if len(cells) > len(groups) else "; with one seed it is unknown: give --seeds 3."
    return "\n".join([*(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines), "",
                      "Validation split, best value of each run; mean [least, most] over seeds.",
                      noise, ""])


def main(argv=None):
    parser = Parser(prog="python -m ups.ablate", description=__doc__)
    parser.add_argument("script", help="such as train_operator.py")
    parser.add_argument("--grid", nargs="+", required=True, metavar="KEY=VALUE,VALUE")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell [1]")
    parser.add_argument("--metric", help="that ranks the runs, as in metrics.jsonl [the stage's]")
    parser.add_argument("--out", default="runs/ablation", help="folder of all runs [%(default)s]")
    args, extra = parser.parse_known_args(argv)
    cells, out = plan(args, extra), Path(args.out)
    with lock_folder(out, "--out"):
        try:
            for place, cell in enumerate(cells, 1):
                label = f"[{place}/{len(cells)}] {cell}"
                if result(cell.run)["status"] != "done":
                    print(label, "begins", flush=True)
                    cell.train(args.script)
                end = result(cell.run, args.metric)
                print(f"{label}: {end['metric']} {end['value']:.4g}" if end["status"] == "done" else
                      f"{label}: {end['status']}, {end['reason']} (see {cell.run}/log.txt)",
                      flush=True)
        finally:
            text = table(cells, args.metric)
            write_text(out / "ablation.md", text)
            print(f"\n{text}", flush=True)
    return int(any(result(cell.run)["status"] != "done" for cell in cells))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, too
        signal.signal(number, signal.default_int_handler)
    command(main)
