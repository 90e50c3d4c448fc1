"""A run as a folder that others can load: weights, configurations and a model card.

    python -m ups.simulator runs/burgers1d OUT

It has the layout of a run, without checkpoints and without paths of this machine.
"""

import itertools
import shlex
import shutil
from pathlib import Path

from ups.arguments import listed, shape_of
from ups.config import Parser, UsageError
from ups.files import read_json, write_json, written
from ups.simulator import Simulator
from ups.stages import finished, load_class, load_generator
from ups.train.run import RunConfig

FILES = ("model/*", "exit.json", "test.json", "choices.json", "*.png")  # that are exported


def export(run, out, license=None, model=None):
    """Write `out` as a whole or not at all; it may replace an earlier export, nothing else."""
    run, out = Path(run), Path(out).absolute()
    taken = out.is_file() or out.exists() and any(out.iterdir())
    if taken and read_json(out / "config.json").get("library_name") != "ups":
        raise UsageError(f"{out} was not written by ups.simulator; give a new folder.")
    sim = Simulator.load(run, "cpu", model)  # refuses what does not belong together
    marks = {f"codec/{task.name}": task.fingerprint for task in sim.tasks.values()}
    marks |= {"operator": sim.operator.mark} | {
        stage: load_generator(run, stage, sim.operator).mark for stage in finished(run)}
    try:
        with written(out) as partial:
            _export(sim, marks, partial)
            (partial / "README.md").write_text(card(sim, out.name, license))
            Simulator.load(partial, "cpu", model)  # what will be read is what was written
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); give another "
                         "folder.") from None
    return marks


def _export(sim, marks, folder):
    """The files of the stages `marks`; in configurations no path of this machine."""
    run, systems = sim.run, vars(RunConfig(run="."))
    for stage in marks:
        for path in itertools.chain(*(run.glob(f"{stage}/{file}") for file in FILES)):
            if not path.resolve().is_relative_to(run.resolve()):
                raise UsageError(f"{path} is a link that leaves the run; put the file there.")
            target = folder / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        if settings := read_json(run / stage / "config.json"):
            write_json(folder / stage / "config.json",
                       settings | {key: systems[key] for key in settings if key in systems})
    write_json(folder / "config.json", {"library_name": "ups", "stages": marks})


def card(sim, name, license=None):
    """The model card: front matter of the hub, use, numbers."""
    first, folder = next(iter(sim.tasks.values())), sim.run / "operator"
    given = "".join([", params={..}" * any(s.low < s.high for s in first.facts.scales),
                     ", inputs={..}" * bool(first.facts.inputs),
                     f', task="{first.name}"' * (len(sim.tasks) > 1)])
    rows = []
    for task, result in read_json(folder / "test.json").get("tasks", {}).items():
        errors = (result["forecasts"][name]["scores"]["nrmse"]["all"]
                  for name in ("operator", "persistence"))
        rows.append(f"| {task} | {' | '.join(f'{error:.3g}' for error in errors)} |")
    rows += [f"\n![roll-out](operator/{path.name})" for path in sorted(folder.glob("rollout*.png"))]
    return f"""---
library_name: ups
{f"license: {license}" if license else "# license: none is given"}
tags: [pde, surrogate, neural-operator, {", ".join(sim.tasks)}]
---
# {name}

A latent simulator for partial differential equations, trained with UPS.

```python
from ups import Simulator

sim = Simulator.load("{name}")  # this folder
u = sim.rollout(u0, 40{given})  # u0 (batch, {listed(shape_of(first))})
```

```
{str(sim).replace(f" of {sim.run} on {sim.device}", "")}
```

| nRMSE on the test split, all steps | operator | persistence |
|---|---|---|
""" + "\n".join([*rows, ""])


def main(argv=None):
    parser = Parser(prog="python -m ups.simulator", description=__doc__)
    parser.add_argument("run", help="such as runs/burgers1d")
    parser.add_argument("out", help="folder to write, named as the model")
    parser.add_argument("--license", help="of the weights, as the hub spells it, such as mit")
    parser.add_argument("--model", help="FILE.py:Class of an operator of your own")
    args = parser.parse_args(argv)
    marks = export(args.run, args.out, args.license, load_class(args.model))
    size = sum(path.stat().st_size for path in Path(args.out).rglob("*.*"))
    print(f"{args.out}: {', '.join(marks)}; {size / 2**20:.1f} MiB. Upload it with\n"
          f"  hf upload {shlex.join([f'USER/{Path(args.out).name}', args.out])}")
