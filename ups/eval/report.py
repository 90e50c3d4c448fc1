"""What an evaluation leaves: metrics.json and report.html, both of them or none.

report.html is one file, for desk and phone, without server, script, network or outside address.
"""

import base64
import datetime
import json
import math
import subprocess
from html import escape
from pathlib import Path
from string import Template

import torch

from ups.eval.finish import LEADS
from ups.eval.forecasts import LABELS, PROBES
from ups.eval.measure import text_table
from ups.eval.plots import CHOICE, COLOURS, curves, draw_trajectories, film, render
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
figure { margin: 0; min-width: 0 } img { width: 100%; height: auto; display: block }
pre { background: #f4f5f7; padding: 10px; font-size: 12.5px } summary { cursor: pointer }
</style></head><body><h1>$title</h1>$body</body></html>
"""
REASONS = {"shuffled": "with the parameters of another trajectory the error must rise",
           "shifted": "fields are shifted, rolled out and shifted back: no change if the operator "
                      "knows that the domain has no beginning",
           "halved": "two steps of dt / 2 for each step: how far can the operator be trusted "
                     "between the dt that it was trained on?"}
NOTES = ("Below a value: its 95 % interval. CRPS of one member is its absolute error. ms: a step "
         "of one trajectory with all its members, decoded, in batches. One true step starts at the "
         "true frame before; training mean: of the training trajectories at each step; codec "
         "floor: encode and decode the truth.")


# files
def write_report(folder, about, pictures):
    """Print the main table and write all files (main process). Earlier ones survive a failure."""
    print(as_text(about))
    about = clean(about)
    texts = {"metrics.json": json.dumps(about, indent=1, allow_nan=False) + "\n",
             "report.html": page(about, pictures)}
    with written(folder) as partial:
        for name, text in texts.items():
            (partial / name).write_text(text)
    print(f"report: {folder / 'report.html'}")


def made_with(accelerator):
    """Device, commit of the code, versions, date."""
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


def clean(value):
    """Plain JSON: None for what is not finite."""
    if isinstance(value, dict):
        return {key: clean(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(about):
    """The main tables, as text."""
    lines = []
    for task, result in about["tasks"].items():
        leads, rows = [lead for lead in LEADS if lead <= result["steps"]], {}
        for name, one in result["forecasts"].items():
            if name not in PROBES:
                score, crps = one["scores"]["nrmse"], one["scores"]["crps"]["all"]
                rows[LABELS.get(name, name)] = [*(score["by_lead"][lead - 1] for lead in leads),
                                                score["all"], *score["interval"], crps]
        head = [*(f"step {lead}" for lead in leads), "all steps", "95 %: low", "high", "CRPS"]
        lines.append(text_table(f"{task}: test nRMSE of {result['trajectories']} trajectories, "
                                f"{result['protocol']}", head, rows, width=20))
        lines += [f"{task} {result['pays']}"] if "pays" in result else []
    if about["steady"]:
        lines.append(f"steady prior: the numbers of its own test, {about['run']}/steady/test.json")
    return "\n".join([*lines, f"{about['definitions']['nrmse']}."] if about["tasks"] else lines)


# parts of the page
def page(about, pictures):
    made, run = about["made_with"], about["run"]
    body = [f"<p>{escape(made['device'])}, processes: {made['processes']}; commit "
            f"{escape(made['commit'])}; torch {escape(made['torch'])}; {made['date']}</p>"]
    body += [f"<h2>{escape(name)}</h2>{_task(result, pictures[name])}"
             for name, result in about["tasks"].items()]
    for name, result in about["steady"].get("tasks", {}).items():
        images = [image(path.read_bytes(), path.name) for path in Path(run, "steady").glob("*.png")]
        rows = [[escape(key), number(value)] for key, value in result.items()]
        body.append(f"<h2>Steady prior: {escape(name)}</h2><p>The numbers of its own test.</p>"
                    f"{table(['', ''], rows)}<div class=scroll>{''.join(images)}</div>")
    lines = [f"accelerate launch train_{stage}.py --config {run}/{stage}/config.json "
             "--run runs/again" for stage in about["config"]]
    flags = " ".join(f"--{key} {value}" for key, value in about["evaluation"].items()
                     if value and key != "run")
    lines.append(f"accelerate launch evaluate.py --run runs/again {flags}")
    terms = "".join(f"<dt><b>{escape(name)}</b></dt><dd>{escape(text)}</dd>" for name, text in
                    (about["definitions"] | about["steady"].get("definition", {})).items())
    body.append(f"<h2>How it was made</h2><pre>{escape(chr(10).join(lines))}</pre>"
                + folded("Definitions", f"<dl>{terms}</dl>"))
    body += [folded(title, f"<pre>{escape(json.dumps(about[key], indent=1))}</pre>") for title, key
             in (("Lineage by fingerprint", "lineage"), ("Configuration", "config"))]
    return Template(PAGE).substitute(title=escape(f"Evaluation of {run}"), body="".join(body))


def number(value, digits=3):
    """1.23e-2 rather than 1.230000e-02; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "&ndash;"
    if isinstance(value, int) or value == 0:
        return str(int(value))
    if 0.01 <= abs(value) < 1000:
        return f"{value:#.{digits}g}".rstrip(".")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def cell(score):
    """A value and its interval."""
    if not score:
        return "&ndash;"
    ends = " to ".join(map(number, score.get("interval", ())))
    return number(score["all"]) + f"<small>{ends}</small>" * bool(ends)


def table(head, rows):
    """Cells are HTML; the first column stays in sight where a phone has to scroll."""
    head = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr><th>{name}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
                   for name, *cells in rows)
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def folded(title, body):
    return f"<details><summary>{title}</summary>{body}</details>"


def image(data, alt, kind="png"):
    data = base64.b64encode(data).decode()
    return f"<img alt='{escape(alt)}' src='data:image/{kind};base64,{data}'>"


def chart(title, x, lines, **settings):
    """Curves, see `plots.curves`, as a figure of the page; none where no value is a number."""
    def draw(figure):
        figure.set_size_inches(4.4, 3)
        curves(figure.subplots(), x, lines, title=title, **settings)

    if all(value is None for _, values, *_ in lines.values() for value in values):
        return ""
    return f"<figure>{image(render(draw, kind='svg'), title, 'svg+xml')}</figure>"


def charts(heading, *parts):
    return f"<h3>{heading}</h3><div class=charts>{''.join(parts)}</div>"


def _task(result, pictures):
    every, steps = result["forecasts"], result["steps"]
    scored = {name: one for name, one in every.items() if name not in PROBES}
    ensembles = [name for name, one in scored.items() if one["members"] > 1]
    shown, leads = ["operator", *ensembles], [lead for lead in LEADS if lead <= steps]
    label = {name: escape(LABELS.get(name, name)) for name in every}

    def line(name, values, low=None, high=None):
        return {LABELS.get(name, name): (COLOURS.get(name, "C6"), values, low, high)}

    def over(metric, names, title, **settings):
        """A metric against the lead time, its interval as a band."""
        lines = {}
        for name in names:
            if name in every and (score := every[name]["scores"].get(metric)):
                lines |= line(name, *(score[key] for key in ("by_lead", "low", "high")))
        return chart(title, range(1, steps + 1), lines, xlabel="step", **settings)

    pays = f" <b>It {escape(result['pays'])}.</b>" if "pays" in result else ""
    parts = [f"<p>{escape(result['pde'])}. {result['trajectories']} test trajectories, "
             f"{escape(result['protocol'])}.{pays}</p>"]
    rows = [[label[name], cell(one["scores"]["nrmse"]),
             *(number(one["scores"]["nrmse"]["by_lead"][lead - 1]) for lead in leads),
             cell(one["scores"]["crps"]), cell(one["scores"].get("crps_ratio")), one["members"],
             number(one["milliseconds"])] for name, one in scored.items()]
    head = ["nRMSE", "all steps", *(f"step {lead}" for lead in leads), "CRPS",
            "CRPS / operator's", "members", "ms"]
    parts.append(f"<h3>Headline</h3>{table(head, rows)}<small>{NOTES}</small>")
    names = dict.fromkeys(metric for one in scored.values() for metric in one["scores"])
    rows = [[name, *(cell(one["scores"].get(name)) for one in scored.values())] for name in names]
    parts.append(folded("All metrics, with intervals",
                        table(["over all steps", *(label[name] for name in scored)], rows)))
    rows = [[one["longest"], *(number(one[f"{what}_{frames}"]) for frames in ("all", "last")
                               for what in ("nrmse", "seconds"))] for one in result["plans"]]
    parts.append("<h3>Cost of a trajectory, in batches</h3>" + table(
        ["longest step, frames", "nRMSE, all frames", "seconds", "nRMSE, last frame", "seconds"],
        rows))
    if steps > 1:
        parts.append(charts(
            "Error against lead time",
            over("nrmse", [*shown, "mean", "persistence"], "nRMSE of all forecasts", yscale="log"),
            over("nrmse", shown, "nRMSE of operator and ensembles")))
    half, spectra = max(result["grid"]) // 2, []
    ticks = [2**k for k in range(half.bit_length())]
    for i, lead in enumerate(result["spectrum_leads"]):
        lines = line("truth", result["spectrum"][i][1:half + 1])
        for name in shown:
            lines |= line(name, every[name]["spectrum"][i][1:half + 1])
        spectra.append(chart(f"energy, step {lead}", range(1, half + 1), lines, yscale="log",
                             xscale="log", xticks=ticks, xticklabels=ticks, xlabel="wavenumber"))
    parts.append(charts("Spectra", *spectra))
    if ensembles:
        ranks = []
        for name in ensembles:
            share = torch.tensor(every[name]["rank"]).mean(0)
            ranks.append(chart(f"rank histogram, {LABELS[name]} (right: 1)", range(len(share)),
                               line(name, (share * len(share)).tolist()), level=1, ylim=(0, None),
                               xlabel=f"of {len(share) - 1} members, below the truth"))
        parts.append(charts(
            "Calibration", over("crps_ratio", ensembles, "CRPS / operator's", level=1),
            over("spread_skill", ensembles, "spread / skill (right: 1)", level=1), *ranks))
    if result["conserved"]:
        parts.append(charts(
            f"Conservation of the mean of {escape(', '.join(result['conserved']))}",
            over("drift", ["codec", *shown], "drift / rms of the first frame", yscale="log")))
    rows = [["operator", cell(every["operator"]["scores"]["nrmse"]), "1"]]
    rows += [[f"{label[name]}<small>{reason}</small>", cell(every[name]["scores"]["nrmse"]),
              cell(every[name]["scores"]["nrmse_ratio"])]
             for name, reason in REASONS.items() if name in every]
    parts.append("<h3>Physics probes</h3>" + table(["", "nRMSE", "times"], rows))
    return "".join(parts) + _trajectories(result, **pictures)


def _trajectories(result, facts, chosen, params, fields):
    """The best, the median and the worst roll-out of the operator: films of fields, and stills."""
    scores = sorted(math.inf if score is None else score for score in
                    result["forecasts"]["operator"]["nrmse_by_trajectory"])
    scores = scores[0], scores[len(scores) // 2], scores[-1]
    fields, cards = {name: field.numpy() for name, field in fields.items()}, []
    for k, choice in enumerate(CHOICE):
        about = [f"nRMSE {number(scores[k])}", f"trajectory {int(chosen[k])}"]
        about += [f"{escape(name)} = {value:g}" for name, value in
                  zip(facts.params, params[k].tolist(), strict=True)]
        moving = "" if len(facts.grid) == 1 else image(
            film(facts, {name: u[k] for name, u in fields.items()}), f"{choice} roll-out")
        cards.append(f"<figure class=film><b>{choice}</b> {', '.join(about)}{moving}</figure>")

    def draw(figure):
        tall = 2.4 if len(facts.grid) == 1 else 1.8  # inches of a row
        figure.set_size_inches(9, tall * (3 + sum(" " in name for name in fields)))
        draw_trajectories(figure, facts, fields, scores)

    return (charts(f"Trajectories: {escape(facts.channels[0])}", *cards)
            + f"<div class=scroll>{image(render(draw), 'stills')}</div>")
