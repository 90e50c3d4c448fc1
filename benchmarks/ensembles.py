"""Ensembles after the same seconds of training: three generators, the control, and what costs none.

    python -m benchmarks.ensembles --task stochastic --seconds 300 --parallel

    stochastic   ns2d with noise, 2000 trajectories, against 512 continuations by the solver
    burgers1d    nu = 0.001: its state determines the next
    ns2d         likewise, seen at every fourth point

It makes the data, trains an operator, and on top of it, for --seconds each: the ensemble, the
control (the operator trained on in the same way, with absolute errors, one member and no noise),
the diffusion, its student, and an operator of another seed. Compilation and validation are not
counted. With --parallel, trainings that do not need each other share the device. The same command
again goes on with what is missing. In quotes, flags change a piece: --ensemble "--length 4". Val
chooses, test is judged once; the table comes last.
"""

import dataclasses
import functools
import json
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import train_consistency
import train_diffusion
import train_ensemble
import train_operator
from benchmarks import bench
from benchmarks.bench import device_name, heading, row
from ups.config import UsageError, check, command, parse
from ups.eval.ensemble import drawn, yardsticks
from ups.eval.finish import TABLES
from ups.eval.forecasts import LABELS
from ups.eval.measure import judge
from ups.eval.metrics import DEFINITIONS
from ups.eval.truth import TRUTH, against_truth, truth_of
from ups.files import read_json, write_json
from ups.latents import open_tasks
from ups.models.generators import Perturbed
from ups.stages import load_generator, load_operator
from ups.train.ranks import make_accelerator

NET = "--model.dim 128 --model.kernel 3 --ema 0.999"
TASKS = {  # how data are made; flags of the operator; of the ensemble and its control
    "stochastic": ("ns2d --forcing stochastic --samples 2000 --chunk 500 --truth 512",
                   f"{NET} --batch_size 64 --lr 4e-3 --tasks ns2d_stochastic", "--batch_size 64"),
    "burgers1d": ("burgers1d --preset medium --nu 0.001",
                  "--batch_size 64 --ema 0.999 --tasks burgers1d", "--batch_size 32 --length 4"),
    "ns2d": ("ns2d --preset medium",
             f"{NET} --batch_size 64 --stride_x 4 --codec.patch 2 --tasks ns2d",
             "--batch_size 32 --length 4"),
}
FLAGS = {"ensemble": "--ema 0.999", "control": "--ema 0.999 --draws 1", "seed": "--seed 1",
         "diffusion": f"--batch_size 128 {NET}", "consistency": "--batch_size 64 --ema 0.999"}
SCRIPTS = {"operator": train_operator, "ensemble": train_ensemble, "control": train_ensemble,
           "diffusion": train_diffusion, "consistency": train_consistency, "seed": train_operator}
TRAINED = {"seed": "operator, another seed", "control": "control", "ensemble": "ensemble",
           "diffusion": "diffusion", "consistency": "student"}
LEADS = 1, 2, 4, 8, 16, 32
TRUTH_MEMBERS = 64  # of ensembles beside the solver's own


@dataclasses.dataclass(frozen=True)
class Config:
    task: str = "stochastic"     # stochastic, burgers1d or ns2d
    seconds: float = 100.0       # of training, for each generator and the control
    operator_seconds: float = 60.0  # of the operator before it
    parallel: bool = False       # trainings that do not need each other at the same time
    members: int = 16            # of the ensembles that are judged
    split: str = "test"          # val: to choose settings
    data: str = ""               # further settings of the data: "--samples 500 --truth 64"
    operator: str = ""           # further flags of each training, in quotes
    ensemble: str = ""
    control: str = ""
    diffusion: str = ""
    consistency: str = ""
    seed: str = ""
    out: str = "benchmarks/results/ensembles"  # a folder for each task

    def __post_init__(self):
        check(self, seconds=(0.1, 1e6), operator_seconds=(0.1, 1e6), members=(2, 4096))
        if self.task not in TASKS or self.split not in ("val", "test"):
            raise UsageError(f"--task is one of {', '.join(TASKS)}, --split val or test.")


def folder_of(cfg, piece):
    """The run of a piece: the control and the second operator have one of their own."""
    own = piece if piece in ("control", "seed") else "run"
    return Path(cfg.out).resolve() / cfg.task / own


def stage_of(piece):
    return {"control": "ensemble", "seed": "operator"}.get(piece, piece)


def train(cfg, piece):
    """Train a piece in a process of its own, unless it is done."""
    folder = folder_of(cfg, piece)
    if read_json(folder / stage_of(piece) / "exit.json").get("status") == "done":
        return
    if piece == "control" and not folder.exists():
        copy_operator(folder_of(cfg, "operator"), folder)
    code = "import sys; from benchmarks.ensembles import work; work(*sys.argv[1:])"
    bench.call(folder.parent / f"{piece}.log", "-c", code, piece,
               json.dumps(dataclasses.asdict(cfg)))


def copy_operator(run, folder):
    for part in ("codec", "operator"):
        shutil.copytree(run / part, folder / part)


def work(piece, job):
    """Time some steps of a piece in a copy of its run, then train it for its seconds."""
    cfg = Config(**json.loads(job))
    script, folder, first = SCRIPTS[piece], folder_of(cfg, piece), stage_of(piece) == "operator"
    more = {"operator": TASKS[cfg.task][1], "ensemble": TASKS[cfg.task][2]}
    given = shlex.split(" ".join([more.get(stage_of(piece), ""), FLAGS.get(piece, ""),
                                  getattr(cfg, piece)]))
    data = {"data": folder.parent / "data"} if first else {}
    path = folder.parent / f"{piece}.json"

    def words(run, steps, moments=1):
        every = {"save_every": -(-steps // moments)}
        return [*given, *bench.flags(steps, moments, run=run, cache=folder.parent / "cache",
                                     **data, **every)]

    if not path.exists():
        probe = folder.with_name(f"{piece}_probe")
        shutil.rmtree(probe, ignore_errors=True)
        if not first:
            copy_operator(folder, probe)
        if piece == "consistency":
            shutil.copytree(folder / "diffusion", probe / "diffusion")
        step = bench.step_seconds(script, lambda steps: words(probe, steps))
        shutil.rmtree(probe)
        seconds = cfg.operator_seconds if first else cfg.seconds
        write_json(path, {"steps": bench.steps_within(seconds, step), "seconds": seconds,
                          "flags": " ".join(given)})
    bench.run(script, words(folder, read_json(path)["steps"], 4))


def table(cfg):
    """The table of a task: every row by every measure at some leads."""
    accelerator, run = make_accelerator(), folder_of(cfg, "operator")
    operator = load_operator(run)
    operator.model.to(accelerator.device)
    task, = open_tasks(accelerator, operator.settings)
    perturbed = load_generator(run, "operator", operator).model
    models, alone = {}, {}  # what draws members, and what has none
    for piece, title in TRAINED.items():
        folder, stage = folder_of(cfg, piece), stage_of(piece)
        if read_json(folder / stage / "exit.json").get("status") != "done":
            continue
        parent = operator if folder == run else load_operator(folder)
        model = load_generator(folder, stage, parent).model
        (parent.model if piece == "seed" else model).to(accelerator.device)
        if folder != run:  # neither noise in it nor on its first state
            alone[title] = Perturbed(parent.model if piece == "seed" else model, None)
            continue
        if piece == "diffusion":
            white = load_generator(folder, stage, operator).model.to(accelerator.device)
            white.calls = 0
            models["coloured residual, no network"] = white
        models[f"{title}, {model.calls} call{'s' * (model.calls > 1)}"] = model

    def forecasts(members):
        found = yardsticks(task, 0, operator.model, perturbed, members)
        return ({LABELS[name]: one for name, one in found.items()}
                | {title: drawn(one, task, 0, 1) for title, one in alone.items()}
                | {title: drawn(one, task, 0, members) for title, one in models.items()})

    chosen = task.fields.split(cfg.split)
    found, _ = judge(accelerator, task, forecasts(cfg.members), chosen, only=TABLES,
                     members=cfg.members)
    result = {"task": cfg.task, "split": cfg.split, "trajectories": len(chosen),
              "members": cfg.members, "device": device_name(),
              "perturbation": perturbed.perturbation[0],
              "pieces": {piece: read_json(run.parent / f"{piece}.json") for piece in SCRIPTS},
              "forecasts": found}
    truth = truth_of(task)
    if truth and cfg.split == "test":
        result["truth"] = against_truth(accelerator, task, truth, forecasts(TRUTH_MEMBERS))
    write_json(run.parent / f"judged_{cfg.split}.json", result)
    show(result)


def show(result):
    """Print the tables of a task."""
    found, truth = result["forecasts"], result.get("truth")
    steps = ", ".join(f"{piece} {one['steps']:,} steps in {one['seconds']:g} s"
                      for piece, one in result["pieces"].items() if one)
    print(f"\n{result['task']}, {result['trajectories']} {result['split']} trajectories, "
          f"{result['members']} members, inputs perturbed by {result['perturbation']:g}, "
          f"{result['device']}: {steps}")
    for score in dict.fromkeys(score for one in found.values() for score in one["scores"]):
        heading(score, "", *(f"step {k}" for k in LEADS), "all")
        for name, one in found.items():
            if score in one["scores"]:
                by_lead = one["scores"][score]["by_lead"]
                row(name, *(f"{by_lead[k - 1]:.3g}" for k in LEADS if k <= len(by_lead)),
                    f"{one['scores'][score]['all']:.3g}")
    for score, title in TRUTH.items() if truth else ():
        heading(title, "", *(f"step {k}" for k in truth["leads"]))
        for name, one in truth["scores"].items():
            row(name, *(f"{value:.3g}" for value in one[score]))
    heading("CRPS / the operator's absolute error, mean over leads", "", "ratio", "ms")
    absolute = torch.tensor(found["operator"]["scores"]["crps"]["by_lead"])
    for name, one in found.items():
        ratio = (torch.tensor(one["scores"]["crps"]["by_lead"]) / absolute).mean()
        row(name, f"{ratio:.3f}", f"{one['milliseconds'] / one['members']:.3g}")
    print(f"\nms: of a step of one member. {DEFINITIONS['crps']}.")


def main(argv=None):
    cfg = parse(Config, argv, __doc__)
    home = folder_of(cfg, "operator").parent
    bench.call(None, "-m", "ups.data", "make", *shlex.split(TASKS[cfg.task][0]),
               *shlex.split(cfg.data), "--out", home / "data")
    for wave in ("operator",), ("ensemble", "control", "diffusion", "seed"), ("consistency",):
        with ThreadPoolExecutor(4 if cfg.parallel else 1) as pool:
            list(pool.map(functools.partial(train, cfg), wave))
    table(cfg)


if __name__ == "__main__":
    command(main)
