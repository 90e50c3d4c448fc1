"""The end of a stage: measure the test split once, print the table, write it down, draw it."""

from ups.eval.metrics import DRIFT, NRMSE
from ups.eval.plots import draw_rollouts, picture
from ups.eval.rollout import measure, predict

LEADS = (1, 5, 10, 20, 40)


def finish_operator(run, model, tasks):
    """Test every task, from the first frame; write `test.json` and a picture each."""
    results, show = {}, run.accelerator.is_main_process
    for index, task in enumerate(tasks):
        tables = measure(run.accelerator, model, task, index, "test")
        results[task.name] = summary(tables)
        if task.conserved:
            results[task.name]["conservation_drift"] = tables["drift"].mean().item()
        order = tables["operator"].mean(1).argsort()
        chosen = task.fields.split("test")[order[[0, len(order) // 2, -1]]]  # best, median, worst
        shown = predict(run.accelerator, model, task, index, chosen)  # every rank, as in `measure`
        if show:
            print(table(task.name, results[task.name]))
            run.write("test.json", {"definition": f"{NRMSE}; {DRIFT}", "split": "test",
                                    "tasks": results})
            name = "rollout.png" if len(tasks) == 1 else f"rollout_{task.name}.png"
            picture(run.folder / name, draw_rollouts, task.fields.facts, 0, shown,
                    tables)
    if show:
        print(NRMSE + ".")


def summary(tables):
    """Means over trajectories: at some lead times, over the whole roll-out, and for one step."""
    leads = [lead for lead in LEADS if lead <= tables["operator"].shape[1]]
    names = ("operator", "persistence", "codec")
    return {"trajectories": len(tables["operator"]), "leads": leads,
            "nrmse": {n: [tables[n][:, k - 1].mean().item() for k in leads] for n in names},
            "nrmse_rollout": {n: tables[n].mean().item() for n in names},
            "nrmse_1": tables["one_step"].mean().item()}


def table(name, result):
    """The headline table as text."""
    head = "".join(f"{f'step {lead}':>11}" for lead in result["leads"])
    count = result["trajectories"]
    lines = [f"\n{name}: test nRMSE of {count} trajectories, rolled out from the first frame",
             f"{'':14}{head}{'all steps':>11}"]
    for row, label in (("operator", "operator"), ("persistence", "persistence"),
                       ("codec", "codec floor")):
        values = [*result["nrmse"][row], result["nrmse_rollout"][row]]
        lines.append(f"{label:14}" + "".join(f"{value:11.2e}" for value in values))
    lines.append(f"one step from the true frame: {result['nrmse_1']:.2e}")
    if "conservation_drift" in result:
        lines.append(f"drift of the conserved mean:  {result['conservation_drift']:.2e}")
    return "\n".join(lines)
