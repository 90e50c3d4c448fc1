"""What an evaluation leaves: metrics.json and report.html, both of them or none.

report.html is one file, for desk and phone, without server, script, network or outside address.
"""

import base64
import datetime
import json
import math
import shlex
import subprocess
from html import escape
from pathlib import Path
from string import Template

import torch

from ups.eval.forecasts import LABELS, PROBES
from ups.eval.measure import LEADS, lead_table, text_table
from ups.eval.plots import CHOICE, COLOURS, curves, draw_costs, draw_rollouts, film, render, three
from ups.eval.truth import TRUTH
from ups.files import written

PAGE = """<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">
<link rel=icon href="data:,"><title>$title</title><style>
* { box-sizing: border-box }
body { max-width: 1120px; margin: auto; padding: 8px 16px 60px; color: #1c2126;
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5em; overflow-wrap: anywhere } h2 { border-top: 1px solid #ccd; margin-top: 2em }
p, dd { max-width: 54em } small { color: #66707a; display: block }
.scroll, pre { overflow-x: auto } .scroll > img { min-width: 760px }
table { border-spacing: 0; font-variant-numeric: tabular-nums }
th, td { padding: 4px 14px 4px 0; text-align: right; white-space: nowrap; vertical-align: top;
  border-bottom: 1px solid #dde; font-weight: 400 }
th:first-child { text-align: left; position: sticky; left: 0; background: #fff }
th small { white-space: normal; max-width: 34em; min-width: 12em }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr));
  align-items: end }
img { width: 100%; height: auto; display: block }
pre { background: #f4f5f7; padding: 10px; font-size: 12.5px } summary { cursor: pointer }
</style></head><body><h1>$title</h1>$body</body></html>
"""
REASONS = {"shuffled": "with the parameters of another trajectory the error must rise",
           "shifted": "fields are shifted, rolled out and shifted back: no change if the operator "
                      "knows that the domain has no beginning"}
NOTES = ("Below a value: its 95 % interval. CRPS of one member is its absolute error. ms: a step "
         "of one trajectory with all its members, decoded, in batches. One true step starts at the "
         "true frame before; training mean: of the training trajectories at each step; codec "
         "floor: encode and decode the truth.")


# files
def write_report(folder, about, pictures):
    """Print the main table and write all files (main process). Earlier ones survive a failure."""
    for task, result in about["tasks"].items():
        print(lead_table(
            f"{task}: test nRMSE of {result['trajectories']} trajectories, {result['protocol']}",
            {name: one for name, one in result["forecasts"].items() if name not in PROBES},
            result["channels"]))
        for title, head, rows in _against_truth(result):
            print(text_table(f"{task}: {title}", head, rows, ".3g"))
        print(*([f"{task} {result['pays']}"] if "pays" in result else []),
              f"{about['definitions']['nrmse']}.", sep="\n")
    if about["steady"]:
        print(f"steady prior: the numbers of its own test, {about['run']}/steady/test.json")
    about = json.loads(json.dumps(about), parse_constant=lambda _: None)  # what is not finite
    with written(folder) as partial:
        (partial / "metrics.json").write_text(json.dumps(about, indent=1) + "\n")
        (partial / "report.html").write_text(page(about, pictures))
    print(f"report: {folder / 'report.html'}")


def made_with(accelerator):
    device, root = accelerator.device, Path(__file__).parent
    git = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty", "--exclude=*"],
                         capture_output=True, text=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return {"device": name, "processes": accelerator.num_processes,
            "commit": git.stdout.strip() or "unknown", "torch": torch.__version__,
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"}


def pays(count, solver, train, each):
    """From where the operator is cheaper than the solver: `count` training trajectories, seconds
    of the solver and of the operator for a trajectory, and of the operator's training."""
    if each >= solver:
        return f"never pays: the operator takes {each:.2g} s a trajectory, the solver {solver:g} s"
    return (f"pays after {(count * solver + train) / (solver - each):,.0f} trajectories: "
            f"({count:,} of training x {solver:g} s + {train:.0f} s to train) / ({solver:g} - "
            f"{each:.2g} s saved by each)")


def _against_truth(result):
    """(title, head, {label: values}) of each measure against the solver's own ensemble."""
    known = result.get("against_truth", {"scores": {}})
    for name, title in TRUTH.items() if known["scores"] else ():
        yield (f"{title}, solver's own ensemble", [f"step {lead}" for lead in known["leads"]],
               {LABELS[label]: scores[name] for label, scores in known["scores"].items()})


# parts of the page
def page(about, pictures):
    made, run = about["made_with"], about["run"]
    body = [f"<p>{escape(made['device'])}, processes: {made['processes']}; commit "
            f"{escape(made['commit'])}; torch {escape(made['torch'])}; {made['date']}</p>"]
    body += [f"<h2>{escape(name)}</h2>{_task(result, **pictures[name])}"
             for name, result in about["tasks"].items()]
    for name, result in about["steady"].get("tasks", {}).items():
        body += [f"<h2>Steady prior: {escape(name)}</h2><p>The numbers of its own test, of "
                 f"{escape(str(result['trajectories']))} samples.</p>",
                 metric_table(result["forecasts"])]
        body += [wide(path.read_bytes(), path.name) for path in Path(run, "steady").glob("*.png")]
    lines = [[f"train_{stage}.py", "--config", f"{run}/{stage}/config.json", "--run", "runs/again"]
             for stage in about["config"]]
    lines.append(["evaluate.py", "--run", "runs/again"])
    for key, value in about["evaluation"].items():
        if value and key != "run":
            lines[-1] += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    lines = [f"accelerate launch {shlex.join(words)}" for words in lines]
    body += [f"<h2>How it was made</h2><pre>{escape(chr(10).join(lines))}</pre>", folded(
        "Definitions", "".join(f"<p><b>{escape(name)}</b>: {escape(text)}</p>"
                               for name, text in about["definitions"].items()))]
    body += [folded(title, f"<pre>{escape(json.dumps(about[key], indent=1))}</pre>") for title, key
             in (("Lineage by fingerprint", "lineage"), ("Configuration", "config"))]
    return Template(PAGE).substitute(title=escape(f"Evaluation of {run}"), body="".join(body))


def cell(value):
    """A number, a score with its interval, or a dash where there is none."""
    if isinstance(value, dict):
        ends = " to ".join(map(cell, value.get("interval", ())))
        return cell(value["all"]) + f"<small>{ends}</small>" * bool(ends)
    if value is None or not math.isfinite(value):
        return "&ndash;"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}"


def table(head, rows):
    """The first column stays in sight where a phone has to scroll."""
    def line(tag, first, *cells):
        rest = "".join(f"<{tag}>{text}</{tag}>" for text in cells)
        return f"<tr><th>{escape(str(first))}</th>{rest}</tr>"

    body = "".join(line("td", name, *map(cell, cells)) for name, *cells in rows)
    return f"<div class=scroll><table>{line('th', *map(escape, head))}{body}</table></div>"


def metric_table(found):
    """All scores of forecasts {name: as of `summarise`}."""
    names = dict.fromkeys(metric for one in found.values() for metric in one["scores"])
    return table(["over all steps", *(LABELS[name] for name in found)],
                 [[name, *(one["scores"].get(name) for one in found.values())] for name in names])


def folded(title, body):
    return f"<details><summary>{title}</summary>{body}</details>"


def image(data, alt, kind="png"):
    data = base64.b64encode(data).decode()
    return f"<img alt='{escape(alt)}' src='data:image/{kind};base64,{data}'>"


def wide(*args):
    return f"<div class=scroll>{image(*args)}</div>"


def chart(title, x, lines, **settings):
    """Curves, see `plots.curves`, as a figure of the page; none where no value is a number."""
    def draw(figure):
        figure.set_size_inches(4.4, 3)
        curves(figure.subplots(), x, lines, title=title, **settings)

    if all(value is None for _, values, *_ in lines.values() for value in values):
        return ""
    return image(render(draw, kind="svg"), title, "svg+xml")


def section(heading, *charts):
    return f"<h3>{escape(heading)}</h3><div class=charts>{''.join(charts)}</div>" * any(charts)


def _task(result, facts, chosen, params, fields, errors):
    every, steps = result["forecasts"], result["steps"]
    scored = {name: one for name, one in every.items() if name not in PROBES}
    ensembles = [name for name, one in scored.items() if one["members"] > 1]
    shown, leads = ["operator", *ensembles], [lead for lead in LEADS if lead <= steps]
    plans, pays = result["plans"], f" <b>It {escape(result.get('pays', ''))}.</b>"

    def line(name, *values):
        return {LABELS.get(name, name): (COLOURS.get(name, "C6"), *values)}

    def over(metric, names, title, **settings):
        """A metric against the lead time, its interval as a band."""
        lines = {}
        for name in names:
            if score := every[name]["scores"].get(metric) if name in every else None:
                lines |= line(name, *(score[key] for key in ("by_lead", "low", "high")))
        return chart(title, range(1, steps + 1), lines, xlabel="step", **settings)

    def costs(figure):
        figure.set_size_inches(4.4, 3)
        draw_costs(figure, "error over cost", {
            f"steps of {plan['longest']}, {which}": (plan[f"seconds_{end}"], plan[f"nrmse_{end}"])
            for plan in plans for end, which in (("all", "all frames"), ("last", "the last one"))},
                   result["solver_seconds"])

    def spectra():
        half = max(result["grid"]) // 2
        ticks = [2**k for k in range(half.bit_length())]
        for i, lead in enumerate(result["spectrum_leads"]):
            lines = line("truth", result["spectrum"][i][1:half + 1])
            for name in shown:
                lines |= line(name, every[name]["spectrum"][i][1:half + 1])
            yield chart(f"energy, step {lead}", range(1, half + 1), lines, yscale="log",
                        xscale="log", xticks=ticks, xticklabels=ticks, xlabel="wavenumber")

    def ranks():
        for name in ensembles:
            count = every[name]["members"]
            yield chart(f"rank histogram, {LABELS[name]} (right: 1)", range(count + 1),
                        line(name, [(count + 1) * share for share in every[name]["rank"]]),
                        level=1, ylim=(0, None), xlabel=f"of {count} members, below the truth")

    probes = [name for name in REASONS if name in every]
    return "".join([
        f"<p>{escape(result['pde'])}. {result['trajectories']} test trajectories, "
        f"{escape(result['protocol'])}.{pays * ('pays' in result)}</p><h3>Headline</h3>",
        table(["nRMSE", "all steps", *(f"step {lead}" for lead in leads), "CRPS",
               "CRPS / operator's", "members", "ms"],
              [[LABELS[name], one["scores"]["nrmse"],
                *(one["scores"]["nrmse"]["by_lead"][lead - 1] for lead in leads),
                one["scores"]["crps"], one["scores"].get("crps_ratio"), one["members"],
                one["milliseconds"]] for name, one in scored.items()]),
        f"<small>{NOTES}</small>",
        folded("All metrics, with intervals", metric_table(scored)),
        "<h3>Cost of a trajectory, in batches</h3>",
        table(["longest step, frames", "nRMSE, all frames", "seconds", "nRMSE, last frame",
               "seconds"], map(dict.values, plans)),
        f"<div class=charts>{image(render(costs, kind='svg'), 'error over cost', 'svg+xml')}</div>",
        *([section("Error against lead time",
                   over("nrmse", [*shown, "mean", "persistence"], "nRMSE of all forecasts",
                        yscale="log"),
                   over("nrmse", shown, "nRMSE of operator and ensembles"))] * (steps > 1)),
        section("Spectra", *spectra()),
        section("Calibration", over("crps_ratio", ensembles, "CRPS / operator's", level=1),
                over("spread_skill", ensembles, "spread / skill (right: 1)", level=1), *ranks()),
        *(f"<h3>{title}</h3>" + table(["", *head], [[name, *row] for name, row in rows.items()])
          for title, head, rows in _against_truth(result)),
        section(f"Conservation of the mean of {', '.join(result['conserved'])}",
                over("drift", ["codec", *shown], "drift / rms of the first frame", yscale="log")),
        "<h3>Physics probes</h3>",
        table(["", "nRMSE", "times"], [
            [LABELS[name], every[name]["scores"]["nrmse"],
             every[name]["scores"].get("nrmse_ratio", 1)] for name in ["operator", *probes]]),
        f"<small>{' '.join(f'{LABELS[name].capitalize()}: {REASONS[name]}.' for name in probes)}"
        f"</small><h3>Trajectories: {escape(facts.channels[0])}</h3>",
        table(["of the operator", "nRMSE", "trajectory", *facts.params], zip(
            CHOICE, three(errors["operator"]).tolist(), chosen.tolist(),
            *params.T.tolist(), strict=True)),
        wide(film(facts, fields, three(errors["operator"])), "films") if facts.grid[1:] else "",
        wide(render(draw_rollouts, facts, fields, errors), "stills")])
