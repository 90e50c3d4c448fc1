"""Quick ablations: train a grid of runs one after the other, and put runs into one table.

    python -m ups.ablate train_operator.py --grid model.dim=32,64 lr=4e-3,8e-3 --seeds 2
    python -m ups.ablate --compare runs/A runs/B       # runs that there are: what differs, scores

Further flags go to the script, for all runs. A run is one process of the script in OUT/HASH, where
HASH is that of its configuration: the same command again skips what is finished and resumes what is
not. Ctrl-C lets the current run write a checkpoint. A run that fails is reported; the others go on.
Rows are ranked by the best validation score; the test score of the same weights enters no choice.
"""

import dataclasses
import hashlib
import importlib.util
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
from ups.train.run import RunConfig
from ups.train.tracking import Metrics

SCORES = ("val/nrmse_rollout", "val/nrmse", "val/crps_ratio", "val/crps")  # of the stages
SPREAD = ("Differences below the spread of seeds are noise; with one seed that spread is unknown: "
          "give --seeds 3.")


@dataclasses.dataclass
class Cell:
    choice: dict  # what tells it from the others, such as {"lr": "1e-3"}
    seed: int
    run: Path
    flags: list = ()

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
    if args.seeds < 1 or not grid or len(grid) < len(args.grid):
        raise UsageError("--grid names each key once, with its values, and --seeds is at least 1.")
    for key in [*grid, *(flag.removeprefix("--").split("=")[0] for flag in extra)]:
        if key in ("run", "seed"):
            raise UsageError(f"--{key} is chosen by --out and --seeds; leave it out.")
    config, cells = config_of(args.script), {}
    plain, systems = flat(parse(config, extra)), vars(RunConfig()).keys() - {"data"}
    for values in itertools.product(*(values.split(",") for values in grid.values())):
        choice = dict(zip(grid, values, strict=True))
        for seed in range(args.seeds):
            flags = [*extra, "--seed", str(seed)]
            for key, value in choice.items():
                switch = {"true": [f"--{key}"], "false": [f"--no-{key}"]}
                switch = switch.get(value) if isinstance(plain.get(key), bool) else None
                flags += switch or [f"--{key}", *value.split()]
            science = {key: value for key, value in flat(parse(config, flags)).items()
                       if key not in systems} | {"script": args.script}
            mark = hashlib.sha256(json.dumps(science, sort_keys=True).encode()).hexdigest()[:10]
            cells[mark] = Cell(choice, seed, Path(args.out) / mark, flags)
    return list(cells.values())


def config_of(script):
    """The Config of a script, which is imported and not run."""
    path = Path(script)
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"{script}: there is no such script.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Config


def existing(runs):
    """Cells of runs that there are, told apart by the settings in which they differ."""
    settings = {}
    for run in dict.fromkeys(map(Path, runs)):
        stage = stage_of(run)
        if stage is None:
            raise UsageError(f"{run} holds no stage that has begun; give folders of runs.")
        settings[run] = read_json(stage / "config.json") | {"run": run.name}
    keys = dict.fromkeys(key for one in settings.values() for key in one if key != "seed")
    differ = [k for k in keys if len({str(one.get(k)) for one in settings.values()}) > 1]
    return [Cell({key: str(one.get(key, "-")) for key in differ} or {"run": run.name},
                 one.get("seed", 0), run) for run, one in settings.items()]


def stage_of(run):
    """The last stage that was trained in a run."""
    ends = [*run.glob("*/exit.json"), *run.glob("codec/*/exit.json")]
    return max(ends, key=lambda path: path.stat().st_mtime).parent if ends else None


def result(run):
    """Status, reason and scores of the last stage of a run; `score` names the metric."""
    about = {"status": "new", "reason": "", "score": "val", "val": math.nan, "test": math.nan}
    stage = stage_of(run)
    if stage is not None:
        lines = Metrics(stage / "metrics.jsonl").read()
        key = next((key for key in SCORES if any(key in line for line in lines)), "val")
        values = [line[key] for line in lines if math.isfinite(line.get(key, math.nan))]
        return about | read_json(stage / "exit.json") | {
            "score": key, "val": min(values, default=math.nan),
            "test": test_score(stage / "test.json")}
    if (run / "log.txt").exists():  # it ended before training began
        words = (run / "log.txt").read_text().strip().splitlines() or ["no output"]
        reason = [line for line in words if line.startswith("error:")] or words
        about |= {"status": "failed", "reason": reason[-1].removeprefix("error: ")}
    return about


def test_score(path):
    """What test.json says of the quantity that validation measures, over tasks as it does."""
    tasks, shares = read_json(path).get("tasks", {}).values(), []
    for rows in (task["scores"].values() for task in tasks if "scores" in task):
        alone, *_, last = (row["crps"] for row in rows)
        shares.append(statistics.mean(a / b for a, b in zip(last, alone, strict=True)))
    if shares or not tasks:
        return statistics.mean(shares or [math.nan])
    return math.prod(task.get("nrmse_grid") or task.get("crps")  # of a codec, of a steady prior
                     or task["nrmse_rollout"]["operator"] for task in tasks) ** (1 / len(tasks))


def table(cells):
    """Markdown: what differs, then mean [least, most] over seeds, best first."""
    keys = [key for key in cells[0].choice if len({cell.choice[key] for cell in cells}) > 1]
    keys, groups, rows = keys or list(cells[0].choice), {}, []
    for cell in cells:
        groups.setdefault(tuple(cell.choice.values()), []).append((cell, result(cell.run)))
    names = {one["score"] for group in groups.values() for _, one in group} - {"val"} or {"val"}
    for group in groups.values():
        done = [one for _, one in group if one["status"] == "done"]
        rows.append((statistics.mean([one["val"] for one in done] or [math.inf]), [
            *(group[0][0].choice[key] for key in keys), f"{len(done)} of {len(group)}",
            *(_span([one[name] for one in done]) for name in ("val", "test"))]))
    metric = " or ".join(sorted(names))
    lines = [[*keys, "seeds done", metric, f"test {metric.replace('val/', '')}"],
             *(row for _, row in sorted(rows, key=lambda row: row[0]))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _span(values):
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else "-"
    return f"{statistics.mean(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


def main(argv=None):
    parser = Parser(prog="python -m ups.ablate", description=__doc__)
    parser.add_argument("script", nargs="?", help="such as train_operator.py")
    parser.add_argument("--grid", nargs="+", default=[], metavar="KEY=VALUE,VALUE")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell [1]")
    parser.add_argument("--out", default="runs/ablation", help="folder of all runs [%(default)s]")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="train nothing")
    args, extra = parser.parse_known_args(argv)
    if args.compare:
        print(f"{table(existing(args.compare))}\n\n{SPREAD}")
        return 0
    if not args.script:
        raise UsageError("name a script and its --grid, or give --compare and some runs.")
    cells, out = plan(args, extra), Path(args.out)
    with lock_folder(out, "--out"):
        try:
            for place, cell in enumerate(cells, 1):
                if result(cell.run)["status"] != "done":
                    print(f"[{place}/{len(cells)}] {cell} begins", flush=True)
                    cell.train(args.script)
                end = result(cell.run)
                words = f"{end['score']} {end['val']:.4g}, test {end['test']:.4g}"
                if end["status"] != "done":
                    words = f"{end['status']}, {end['reason']} (see {cell.run}/log.txt)"
                print(f"[{place}/{len(cells)}] {cell}: {words}", flush=True)
        finally:
            write_text(out / "ablation.md", f"{table(cells)}\n\n{SPREAD}\n")
            print(f"\n{table(cells)}\n\n{SPREAD}", flush=True)
    return int(any(result(cell.run)["status"] != "done" for cell in cells))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, too
        signal.signal(number, signal.default_int_handler)
    command(main)
