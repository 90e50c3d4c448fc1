"""report.html: the whole evaluation as one file, without server or network, for desk and phone.

Sections, for every task: headline, error against lead time, error budget, all metrics, spectra,
calibration, conservation, physics probes, trajectories; then configuration, versions, lineage and
the commands that reproduce it. Everything is drawn from metrics.json but the pictures.
"""

import base64
import json
import math
from html import escape
from pathlib import Path
from string import Template

from ups.eval.charts import cell, chart, key, number, table
from ups.eval.finish import LEADS
from ups.eval.forecasts import LABELS, PROBES
from ups.eval.style import PAGE, SCRIPT, STYLE
from ups.eval.trajectories import trajectories

ENSEMBLES = ("ensemble", "diffusion", "consistency")
METRICS = {"rmse": "RMSE", "vrmse": "VRMSE", "relative_l2": "relative L2", "max_error": "max error",
           "mae": "absolute error", "crps": "CRPS", "sample_nrmse": "nRMSE of one member",
           "crmse": "cRMSE", "brmse": "bRMSE", "frmse_low": "fRMSE low", "frmse_mid": "fRMSE mid",
           "frmse_high": "fRMSE high", "spectrum_error": "high-band spectrum error",
           "correlation_time": "correlation time", "drift": "conservation drift",
           "spread_skill": "spread / skill"}


def page(about, pictures):
    tasks = "".join(f"<section><h2>{escape(name)}</h2>{_task(result, pictures[name])}</section>"
                    for name, result in about["tasks"].items())
    return Template(PAGE).substitute(title=escape(f"Evaluation of {about['run']}"), style=STYLE,
                                     script=SCRIPT, body=tasks + _steady(about) + _about(about))


def _task(result, pictures):
    shown = {name: one for name in LABELS if (one := result["forecasts"].get(name))}
    scored = {name: one for name, one in shown.items() if name not in PROBES}
    parts = [f"<p class=lead>{_words(result)}</p>", _headline(result, scored),
             _metrics(scored), _lead_times(result, scored), _budget(scored),
             _spectra(result, scored), _calibration(result, scored),
             _conservation(result, scored), _probes(shown)]
    try:
        parts.append(trajectories(result, pictures))
    except ImportError as error:
        parts.append(f"<p>No pictures of trajectories: {escape(str(error))}.</p>")
    return "".join(parts)


def _words(result):
    def value(name):
        score = result["forecasts"][name]["scores"]["nrmse"]
        low, high = map(number, score["interval"])
        return f"<b>{number(score['all'])}</b> ({low} to {high})"

    best = [name for name in ("operator", *ENSEMBLES) if name in result["forecasts"]]
    scores = "; ".join(f"{escape(LABELS[name])} {value(name)}" for name in best)
    return (f"{escape(result['pde'])}. {result['trajectories']} test trajectories, "
            f"{escape(result['protocol'])}. nRMSE over all steps: {scores}; persistence "
            f"{value('persistence')}. In brackets: 95 % intervals.")


def _headline(result, scored):
    leads = [lead for lead in LEADS if lead <= result["steps"]]
    rows = []
    for name, one in scored.items():
        score = one["scores"]["nrmse"]
        rows.append([key(name, LABELS[name]), f"<b>{cell(score)}</b>",
                     *(number(score["by_lead"][lead - 1]) for lead in leads)])
    head = ["nRMSE", "all steps", *(f"step {lead}" for lead in leads)]
    notes = [f"{LABELS[name]}: the mean of {one['members']} members, {one['calls']} network calls "
             "each" for name, one in scored.items() if name in ENSEMBLES]
    notes += ["one true step: from the true frame before", "training mean: of training "
              "trajectories at each step", "codec floor: encoding and decoding the truth"]
    return f"<h3>Headline</h3>{table(head, rows)}<small>{escape('; '.join(notes))}.</small>"


def _lead_times(result, scored):
    if result["steps"] == 1:
        return ""
    names = [name for name in scored if name != "one_step"]
    if _error(scored["codec"]) < 1e-3 * _error(scored["operator"]):
        names.remove("codec")  # next to nothing: it would press all other curves together
    return ("<h3>Error against lead time</h3>" + _figures(
        _over(result, scored, "nrmse", names, "All forecasts", "nRMSE", log=True),
        _over(result, scored, "nrmse", [n for n in names if n not in ("persistence", "mean")],
              "Without the yardsticks", "nRMSE")))


def _figures(*charts):
    return f"<div class=charts>{''.join(charts)}</div>"


def _over(result, scored, metric, names, title, ylabel, **options):
    """A metric against the lead time, with its interval as a band."""
    scores = {name: scored[name]["scores"][metric] for name in names if name in scored}
    series = {LABELS[name]: (name, score["by_lead"], score["low"], score["high"])
              for name, score in scores.items()}
    return chart(title, range(1, result["steps"] + 1), series, "step",
                 f"{ylabel}, band: 95 % interval", **options)


def _spectra(result, scored):
    half, charts = max(result["grid"]) // 2, []
    for i, lead in enumerate(result["spectrum_leads"]):
        series = {"truth": ("truth", result["spectrum"][i][1:half + 1], None, None)}
        series |= {LABELS[name]: (name, scored[name]["spectrum"][i][1:half + 1], None, None)
                   for name in ("operator", *ENSEMBLES) if name in scored}
        charts.append(chart(f"Step {lead}", range(1, half + 1), series, "wavenumber",
                            "energy, mean over trajectories", log=True, logx=True))
    return f"<h3>Spectra</h3>{_figures(*charts)}"


def _calibration(result, scored):
    there = [name for name in ENSEMBLES if name in scored]
    if not there:
        return "<h3>Calibration</h3><p>This run has no generator of ensembles.</p>"
    charts = [_over(result, scored, "crps_ratio", there, "CRPS",
                    "share of the operator's absolute error", line=1),
              _over(result, scored, "spread_skill", there, "Spread / skill", "1 is right", line=1)]
    for name in there:
        ranks = scored[name]["rank"]
        mean = [sum(column) / len(ranks) for column in zip(*ranks, strict=True)]
        charts.append(chart(f"Rank histogram, {LABELS[name]}", range(len(mean)),
                            {"all steps": (name, mean, None, None)}, "members below the truth",
                            "share of points, flat is right", bars=True, line=1 / len(mean)))
    return f"<h3>Calibration</h3>{_figures(*charts)}"


def _budget(scored):
    order = [name for name in ("codec", "one_step", "operator", *ENSEMBLES)
             if name in scored]
    value = {name: _error(scored[name]) for name in order}
    rows, most = [], max(v for v in value.values() if v < math.inf)
    for name in order:
        one, gains, calls = scored[name], [], "0" if name == "codec" else "1"
        if name in ENSEMBLES:
            gains.append(f"nRMSE {_change(one['scores']['nrmse_ratio'])}")
        if name in ENSEMBLES:
            gains.append(f"CRPS {_change(one['scores']['crps_ratio'])}")
            calls = f"1 + {one['members']} x {one['calls']}"
        width = 100 * min(1, value[name] / most)
        rows.append([key(name, LABELS[name]), number(value[name]),
                     f'<div class="bar {name}" style="width:{width:.1f}%"></div>',
                     "<br>".join(gains) or "&ndash;", number(one["milliseconds"]), calls])
    head = ["part", "nRMSE", "", "against the operator", "ms", "network calls"]
    return ("<h3>Error budget</h3><p>What each part costs and gains, over all steps. An ensemble "
            "is judged by its mean (nRMSE) and as a whole (CRPS against the operator's absolute "
            "error). Milliseconds are for a step of one trajectory, with all its members, decoding "
            f"included, in batches, on the device below.</p>{table(head, rows, 'budget')}")


def _error(one):
    """nRMSE over all steps; infinite where the roll-out left all bounds."""
    error = one["scores"]["nrmse"]["all"]
    return math.inf if error is None else error


def _change(ratio):
    if None in (ratio["all"], *ratio["interval"]):
        return "&ndash;"
    low, high = (f"{100 * (end - 1):+.0f}" for end in ratio["interval"])
    return f"{100 * (ratio['all'] - 1):+.0f} % <i>({low} to {high})</i>"


def _metrics(scored):
    rows = []
    for metric, label in METRICS.items():
        if any(metric in one["scores"] for one in scored.values()):
            rows.append([label, *(cell(one["scores"].get(metric)) for one in scored.values())])
    head = ["over all steps", *(escape(LABELS[name]) for name in scored)]
    return ("<details><summary>All metrics, with intervals</summary>"
            f"{table(head, rows)}</details>")


def _conservation(result, scored):
    if not result["conserved"]:
        return "<h3>Conservation</h3><p>This equation keeps the mean of no channel.</p>"
    figure = _over(result, scored, "drift", ("codec", "operator", *ENSEMBLES),
                   "Drift of the conserved mean", "share of the first frame's rms", log=True)
    return (f"<h3>Conservation</h3><p>The equation keeps the mean of "
            f"{escape(', '.join(result['conserved']))}.</p>{_figures(figure)}")


def _probes(shown):
    reasons = {"shuffled": "With the parameters of another trajectory the error must rise.",
               "shifted": "Fields that are shifted, rolled out and shifted back: no change if the "
                          "operator knows that the domain has no beginning.",
               "halved": "Two steps of dt / 2 for each step; training has seen one dt alone, so a "
                         "rise says how far the operator can be trusted between."}
    absent = {"shuffled": "the data have one set of parameters", "shifted": "no axis is free",
              "halved": "there is one step"}
    rows = [["operator, as it is", cell(shown["operator"]["scores"]["nrmse"]), "1"]]
    for name, reason in reasons.items():
        scores = shown.get(name, {"scores": {}})["scores"]
        reason = reason if scores else f"Not here: {absent[name]}."
        rows.append([f"{LABELS[name]}<small>{reason}</small>", cell(scores.get("nrmse")),
                     cell(scores.get("nrmse_ratio"))])
    return f"<h3>Physics probes</h3>{table(['', 'nRMSE', 'times'], rows, 'probes')}"


def _steady(about):
    """What train_steady.py reported of its own test, and its pictures."""
    if not about["steady"]:
        return ""

    def rows(value, name=""):
        if isinstance(value, dict):
            for inner, item in value.items():
                yield from rows(item, f"{name} / {inner}" if name else inner)
        else:
            yield [escape(name), number(value) if isinstance(value, float) else escape(str(value))]

    tables = "".join(f"<h3>{escape(task)}</h3>{table(['', ''], list(rows(result)))}"
                     for task, result in about["steady"]["tasks"].items())
    pictures = "".join(
        f"<img alt='{escape(path.name)}' src='data:image/png;base64,"
        f"{base64.b64encode(path.read_bytes()).decode()}'>"
        for path in sorted((Path(about["run"]) / "steady").glob("*.png")))
    terms = _terms(about["steady"]["definition"])
    return (f"<section><h2>Steady prior</h2><p>The numbers of its own test, split "
            f"{escape(about['steady']['split'])}.</p>{pictures}{tables}<details>"
            f"<summary>Definitions</summary>{terms}</details></section>")


def _terms(definitions):
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
                            for name, text in definitions.items()) + "</dl>"


def _about(about):
    def block(value):
        return f"<pre>{escape(json.dumps(value, indent=1))}</pre>"

    run, again = about["run"], "runs/again"
    lines = [f"accelerate launch train_{stage}.py --config {run}/{stage}/config.json --run {again}"
             for stage in about["config"]]
    flags = " ".join(f"--{key} {value}" for key, value in about["evaluation"].items()
                     if value and key not in ("run", "compare"))
    lines.append(f"accelerate launch evaluate.py --run {again} {flags}")
    return (f"<section><h2>How it was made</h2><h3>Commands</h3><pre>{escape(chr(10).join(lines))}"
            f"</pre><details><summary>Definitions</summary>{_terms(about['definitions'])}</details>"
            f"<details><summary>Lineage by fingerprint</summary>{block(about['lineage'])}</details>"
            f"<details><summary>Configuration</summary>{block(about['config'])}</details>"
            f"<details><summary>Versions</summary>{block(about['versions'])}</details></section>")
