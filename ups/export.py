"""Pack a run for other people: weights, configurations and a model card in one folder.

    python -m ups.export runs/NAME --out DIR
    hf upload USER/NAME DIR                  # `huggingface-cli upload` in older versions

    DIR/README.md           model card: front matter for the hub, use, the measured tables
        config.json         fields of every task, fingerprint of every stage
        codec/TASK/model/   model.safetensors and config.json, as in the run
        operator/           model/, config.json, exit.json, test.json, pictures; so each stage
        evaluation/         tables of evaluate.py (*.csv), where the run has them

This is the layout of a run without its checkpoints, so that `Simulator.load` reads both.
"""

import shlex
import shutil
from pathlib import Path

from ups.config import Parser, UsageError, command
from ups.eval.forecasts import YARDSTICKS
from ups.eval.report import LEADS
from ups.files import read_json, write_json, written
from ups.simulator import Simulator, finished
from ups.stages import load_corrector
from ups.train.systems import RunConfig

FILES = ("model/*", "exit.json", "test.json", "*.png")
ROWS = ("operator", "diffusion", "consistency", "persistence", "mean", "codec")


def export(run, out, license=None):
    """Write `out` as a whole or not at all; it may replace an earlier export, nothing else."""
    run, out = Path(run), Path(out).absolute()
    foreign = out.is_file() or out.exists() and any(out.iterdir())
    if foreign and read_json(out / "config.json").get("library_name") != "ups":
        raise UsageError(f"{out} was not written by ups.export; give a new folder as --out.")
    sim = Simulator.load(run, "cpu")  # refuses what does not belong together
    marks = {f"codec/{task.name}": task.fingerprint for task in sim.tasks.values()}
    marks["operator"] = sim.operator.mark
    for stage in finished(run):
        marks[stage] = load_corrector(run, stage, sim.operator).mark

    patterns = [f"{stage}/{file}" for stage in marks for file in FILES] + ["evaluation/*.csv"]
    systems = RunConfig()  # its defaults, in place of the paths of this machine
    with written(out) as partial:
        for path in (path for pattern in patterns for path in sorted(run.glob(pattern))):
            target = partial / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        for stage in marks:
            settings = read_json(run / stage / "config.json").items()
            write_json(partial / stage / "config.json",
                       {key: getattr(systems, key, value) for key, value in settings})
        write_json(partial / "config.json", {"library_name": "ups", "stages": marks,
                                             "tasks": sim.operator.config["fields"]})
        (partial / "README.md").write_text(card(sim, out.name, marks, license))
        Simulator.load(partial, "cpu")  # what will be read is what was written
    return marks


def card(sim, name, marks, license=None):
    """The model card: front matter, use, numbers, lineage."""
    from huggingface_hub import EvalResult, ModelCardData

    tables, definition = measured(sim)
    results = [EvalResult("other", task, task, "nrmse", rows["operator"]["all steps"],
                          task_name="roll-out", dataset_split="test", metric_name="nRMSE")
               for task, rows in tables.items()]
    front = ModelCardData(library_name="ups", license=license, eval_results=results, tags=[
        "pde", "surrogate", "neural-operator", *sim.tasks], model_name=name)
    spec = next(iter(sim.tasks.values())).fields.facts
    shape = ", ".join(map(str, (len(spec.channels), *spec.grid)))
    which = f', task="{spec.name}"' if len(sim.tasks) > 1 else ""
    lines = ["---", front.to_yaml(), "---", f"# {name}", "",
             "A latent simulator for partial differential equations, trained with UPS.", "",
             "```python", "from ups import Simulator", "",
             f'sim = Simulator.load("{name}")  # this folder',
             f"u = sim.rollout(u0, 40{which})  # u0 (batch, {shape}) -> (batch, 40, {shape})",
             "```", "", "```", str(sim).replace(f" of {sim.run} on {sim.device}", ""), "```", "",
             "## Measured on the test split", ""]
    for task, rows in tables.items():
        lines += _table(f"{task}: nRMSE", rows)
    lines += [f"{definition}.", ""]
    lines += [f"![roll-out](operator/{path.name})\n"
              for path in sorted((sim.run / "operator").glob("rollout*.png"))]
    lines += ["## Lineage", ""]
    lines += _table("stage", {stage: {"fingerprint": mark} for stage, mark in marks.items()})
    return "\n".join(lines)


def measured(sim):
    """{task: {row: {column: value}}} of the evaluation, or else of the operator's own test."""
    about, test = (read_json(sim.run / path)
                   for path in ("evaluation/metrics.json", "operator/test.json"))
    tables = {}
    if not about:
        for task, result in test.get("tasks", {}).items():
            head = [*(f"step {lead}" for lead in result["leads"]), "all steps"]
            tables[task] = {row: dict(zip(head, [*result["nrmse"][row], last], strict=True))
                            for row, last in result["nrmse_rollout"].items()}
        return tables, test.get("definition", "")
    if about["lineage"]["operator"]["fingerprint"] != sim.operator.mark:
        raise UsageError(f"{sim.run}/evaluation is of another operator; run evaluate.py again.")
    for task, result in about["tasks"].items():
        steps, tables[task] = [lead for lead in LEADS if lead <= result["steps"]], {}
        for row in (row for row in ROWS if row in result["forecasts"]):
            forecast = result["forecasts"][row]
            nrmse, crps = (forecast["scores"][name] for name in ("nrmse", "crps"))
            tables[task][row] = {f"step {k}": nrmse["by_lead"][k - 1] for k in steps} | {
                "all steps": nrmse["all"], "CRPS": crps["all"],
                "members": forecast["members"],
                "calls": 0 if row in YARDSTICKS else forecast["calls"]}
    return tables, "; ".join(about["definitions"][name] for name in ("nrmse", "crps"))


def _table(title, rows):
    """Lines of a markdown table of {row: {column: value}}."""
    head = [title, *next(iter(rows.values()))]
    lines = [head, ["---"] * len(head)]
    lines += [[row, *(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values.values())]
              for row, values in rows.items()]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def main(argv=None):
    parser = Parser(prog="python -m ups.export", description=__doc__)
    parser.add_argument("run", help="such as runs/burgers1d")
    parser.add_argument("--out", required=True, help="folder to write, named as the model")
    parser.add_argument("--license", help="of the weights, as the hub spells it, such as mit")
    args = parser.parse_args(argv)
    marks = export(args.run, args.out, args.license)
    size = sum(path.stat().st_size for path in Path(args.out).rglob("*.*"))
    print(f"{args.out}: {', '.join(marks)}; {size / 2**20:.1f} MiB. Upload it with\n"
          f"  hf upload {shlex.join([f'USER/{Path(args.out).name}', args.out])}")


if __name__ == "__main__":
    command(main)
