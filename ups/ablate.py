"""Quick ablations: train every cell of a grid, several seeds each, and compare them.

    python -m ups.ablate train_operator.py --grid model.body=pdet,plain lr=1e-3,3e-4 --seeds 2
    python -m ups.ablate train_operator.py --grid unroll=1,4 --seconds 60 --tasks advection1d
    python -m ups.ablate train_diffusion.py --grid lr=1e-3,3e-3 --link runs/X/codec runs/X/operator

Flags that are not listed below go to the script, for all cells. A cell is one process of the script
with a run of its own, OUT/HASH; cells run one after the other, or one on each GPU. HASH is that of
the configuration, so the same command again skips what is finished and resumes what is not; Ctrl-C
lets running cells write a checkpoint. A cell that fails is reported, and the others go on.

Cells are ranked by their best validation score; the test score beside it enters no choice. Writes
OUT/ablation.csv, a line for each run, and OUT/ablation.md, the table. Exit code 1 where one failed.
"""

import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import cuda

from ups.config import Parser, UsageError, command, flat, parse
from ups.eval.ablation import SCORES, result, table, write_csv
from ups.files import read_json, write_json
from ups.train.folder import take_lock
from ups.train.systems import RunConfig
from ups.train.tracking import Metrics

PROBE = 50  # steps from which the speed is measured, for --seconds


@dataclasses.dataclass
class Cell:
    choice: dict  # what the grid says, such as {"lr": "1e-3"}
    config: dict  # of the script, flat
    flags: list   # that give it, but for --run
    run: Path
    alike: str    # hash of the configuration but for its seed

    def __str__(self):
        words = self.choice | {"seed": self.config["seed"]}
        return " ".join(f"{key}={value}" for key, value in words.items())

    def start(self, args, device, *more):
        """A process of the script, its output in log.txt."""
        self.run.mkdir(parents=True, exist_ok=True)
        for source in map(Path, args.link):
            if not (self.run / source.name).exists():
                (self.run / source.name).symlink_to(source.resolve())
        env = {"ACCELERATE_MIXED_PRECISION": "no"} | os.environ  # as of a launcher: ends with us
        env |= {"CUDA_VISIBLE_DEVICES": device} if device else {}
        call = [sys.executable, args.script, *self.flags, "--run", self.run, *more]
        with open(self.run / "log.txt", "w") as log:  # own session: Ctrl-C comes to us alone
            return subprocess.Popen(list(map(str, call)), env=env, stdout=log, stderr=log,
                                    start_new_session=True)


def plan(args, extra):
    """All cells, each with a configuration that the script accepts."""
    if wrong := [item for item in args.grid if not all(item.partition("="))]:
        raise UsageError(f"--grid {wrong[0]}: it is KEY=VALUE,VALUE, such as lr=1e-3,3e-4.")
    if args.seeds < 1 or not 0 <= args.seconds < math.inf:
        raise UsageError("--seeds is at least 1, and --seconds at least 0.")
    config, grid = config_of(args.script), dict(item.partition("=")[::2] for item in args.grid)
    if len(grid) < len(args.grid):
        raise UsageError("--grid names a key twice; list its values, as in lr=1e-3,3e-4.")
    taken = {"run": "--out", "seed": "--seeds"} | ({"steps": "--seconds"} if args.seconds else {})
    for key in [*grid, *(flag.removeprefix("--").split("=")[0] for flag in extra)]:
        if key in taken:
            raise UsageError(f"{key} is set here by {taken[key]}; leave it out.")
    if missing := [folder for folder in args.link if not Path(folder).is_dir()]:
        raise UsageError(f"--link {missing[0]}: there is no such folder.")
    plain, cells = flat(parse(config, extra)), {}
    systems = vars(RunConfig()).keys() - {"data"}
    for values in itertools.product(*(values.split(",") for values in grid.values())):
        choice = dict(zip(grid, values, strict=True))
        for seed in range(args.seeds):
            flags = [*extra, "--seed", str(seed)]
            for key, value in choice.items():
                switch = {"true": [f"--{key}"], "false": [f"--no-{key}"]}
                switch = switch if isinstance(plain.get(key), bool) else {}
                several = [value] if isinstance(plain.get(key), str) else value.split()
                flags += switch.get(value.lower(), [f"--{key}", *several])
            filled = flat(parse(config, flags))
            science = {key: filled[key] for key in filled if key not in systems}
            science |= {"script": args.script, "link": args.link, "seconds": args.seconds}
            mark, alike = _hash(science), _hash(science | {"seed": None})
            cells[mark] = Cell(choice, filled, flags, Path(args.out) / mark, alike)
    return list(cells.values())


def config_of(script):
    """The Config of a script, which is imported and not run."""
    path = Path(script)
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"{script}: there is no such script.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "Config"):
        raise UsageError(f"{script} has no Config, as the stages have.")
    return module.Config


def _hash(values):
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def set_steps(args, cells, device):
    """Let all seeds of a choice take so many steps that training takes about --seconds."""
    path = Path(args.out) / "steps.json"
    known = read_json(path)
    for cell in cells:
        if cell.alike not in known:
            known[cell.alike] = fitting_steps(args, cell, device)
            write_json(path, known)
            print(f"{cell}: {known[cell.alike]} steps in {args.seconds:g} s", flush=True)
        cell.flags += ["--steps", str(known[cell.alike])]


def fitting_steps(args, cell, device):
    """Time the steps and the validation of a short run, by its metrics.jsonl."""
    probe = dataclasses.replace(cell, run=Path(args.out) / "probe")
    often = f"--steps {PROBE} --log_every 5 --eval_every {PROBE} --save_every {PROBE}".split()
    process, seen, now = probe.start(args, device, *often), [], time.perf_counter
    try:
        while process.poll() is None and not (seen and seen[-1][1].keys() & set(SCORES)):
            time.sleep(0.02)
            files = probe.run.glob("**/metrics.jsonl")
            lines = [line for path in files for line in Metrics(path).read()]
            seen += [(now(), line) for line in lines[len(seen):]]
            if seen and now() - seen[0][0] > args.seconds:
                break
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(probe.run)
    train = [(at, line["step"]) for at, line in seen if "train/loss" in line]
    if len(train) < 2:
        return 5  # very slow, or it fails, which the cell itself will tell
    step = (train[-1][0] - train[0][0]) / (train[-1][1] - train[0][1])
    check = seen[-1][0] - train[-1][0]  # a validation
    return max(1, int((args.seconds - check) / (step + check / cell.config["eval_every"])))


def run_all(args, cells):
    """Train what is not finished, one cell at a time on each device."""
    waiting = [cell for cell in cells if result(cell.run)["status"] != "done"]
    print(f"{len(cells)} runs, {len(cells) - len(waiting)} finished, in {args.out}", flush=True)
    ids = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(cuda.device_count())))
    devices, free, live = ids.split(","), queue.SimpleQueue(), set()
    for device in devices:
        free.put(device)
    if args.seconds:
        set_steps(args, waiting, devices[0])

    def train(cell):
        device, begin, place = free.get(), time.time(), f"[{cells.index(cell) + 1}/{len(cells)}]"
        print(f"{place} {cell} begins", flush=True)
        process = cell.start(args, device)
        live.add(process)
        process.wait()
        live.discard(process)
        free.put(device)
        seconds = read_json(cell.run / "cell.json").get("seconds", 0) + time.time() - begin
        write_json(cell.run / "cell.json", {"cell": str(cell), "seconds": round(seconds, 1)})
        end = result(cell.run)
        words = f"val {end['val']:.4g}, test {end['test']:.4g}, {seconds:.0f} s"
        if end["status"] != "done":
            words = f"{end['status']}, {end['reason']} (see {cell.run}/log.txt)"
        print(f"{place} {cell}: {words}", flush=True)

    pool = ThreadPoolExecutor(len(devices))
    try:
        list(pool.map(train, waiting))
    finally:  # after Ctrl-C: none begins any more, and those that run write a checkpoint
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(live):
            process.terminate()
        pool.shutdown()


def main(argv=None):
    parser = Parser(prog="python -m ups.ablate", description=__doc__)
    parser.add_argument("script", help="such as train_operator.py")
    parser.add_argument("--grid", nargs="+", required=True, metavar="KEY=VALUE,VALUE")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell [1]")
    parser.add_argument("--seconds", type=float, default=0.0, help="train each cell for about so "
                        "long: its speed is measured in a short run, and --steps set, so that the "
                        "learning rate still ends at zero [0: --steps of the script]")
    parser.add_argument("--out", default="runs/ablation", help="folder of all runs [%(default)s]")
    parser.add_argument("--link", nargs="+", default=[], metavar="FOLDER",
                        help="earlier stages that every cell builds on, such as runs/X/operator")
    args, extra = parser.parse_known_args(argv)
    cells, out = plan(args, extra), Path(args.out)
    lock = take_lock(out, "--out")
    try:
        run_all(args, cells)
    finally:
        lock.close()
        write_csv(out / "ablation.csv", cells)
        (out / "ablation.md").write_text(table(cells) + "\n")
        print(f"\n{table(cells)}\n\nmean [least, most] over seeds, ranked by the best validation "
              f"score; test entered no choice. Every run: {out / 'ablation.csv'}", flush=True)
    return int(any(result(cell.run)["status"] != "done" for cell in cells))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background, too
        signal.signal(number, signal.default_int_handler)
    command(main)
