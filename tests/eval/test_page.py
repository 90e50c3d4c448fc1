"""The report and the table over runs, as text and in a real browser where there is one."""

import html
import json
import re
import shutil
import subprocess
import types
from html.parser import HTMLParser

import pytest
from accelerate import Accelerator
from decaying import Generator, decaying, operator

import evaluate
from ups.eval.charts import chart, number
from ups.eval.metrics import DEFINITIONS
from ups.eval.outputs import clean
from ups.eval.page import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROBE = """<script>window.onload = () => { const wide = [...document.querySelectorAll('*')].filter(
e => !e.closest('.scroll, pre, svg') && e.getBoundingClientRect().right > innerWidth + 1)
parent.postMessage(JSON.stringify({width: innerWidth, all: document.documentElement.scrollWidth,
wide: wide.map(e => e.outerHTML.slice(0, 80)), small: Math.min(...[...document.querySelectorAll(
'svg text')].map(e => e.getBoundingClientRect().height)), empty: [...document.querySelectorAll(
'.curve')].filter(e => !e.getAttribute('points')).length, sorted: SORT}), '*') }</script>"""
FRAME = """<!doctype html><title></title><iframe src=probe.html width={width} height=800
style=border:0></iframe><script>onmessage = e => {{ document.title = e.data }}</script>"""
CLICK = """(() => { const t = document.querySelector('table'), h = t.tHead.rows[0].cells[1]
const column = () => [...t.tBodies[0].rows].map(r => r.cells[1].textContent)
h.click(); const up = column(); h.click(); return [up, column()] })()"""


@pytest.fixture(scope="module")
def report():
    """A page of two tasks, in one and two dimensions, with ensembles."""
    draw = types.SimpleNamespace(model=Generator(), settings=types.SimpleNamespace(
        members=6, calls=1))
    return written(operator, [decaying(), decaying("ns2d", (12, 8))], diffusion=draw,
                   consistency=draw)


def written(operator, tasks, **stages):
    stages = {"operator": types.SimpleNamespace(model=operator), **stages}
    results, pictures = {}, {}
    for index, task in enumerate(tasks):
        results[task.name], pictures[task.name] = evaluate.evaluate(
            Accelerator(cpu=True), evaluate.Config(), task, index, stages)
    about = clean({"run": "runs/<b>", "tasks": results, "steady": {}, "definitions": DEFINITIONS,
                   "evaluation": {"protocol": "initial"}, "lineage": {"operator": "f00d"},
                   "config": {"operator": {"lr": 0.125}}, "versions": {"torch": "2"}})
    return page(about, pictures)


def browse(path, width, click="null"):
    """Load a page at a width; what it says of itself, and its console.

    In a frame, for a window of a headless browser cannot be as narrow as a phone.
    """
    text = path.read_text().replace("</body>", PROBE.replace("SORT", click) + "</body>")
    path.with_name("probe.html").write_text(text)
    frame = path.with_name("frame.html")
    frame.write_text(FRAME.format(width=width))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={path.parent / 'profile'}", "--window-size=1400,900",
         "--virtual-time-budget=2000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title and title[1], done.stderr[-2000:]
    return (json.loads(html.unescape(title[1])),
            [line for line in done.stderr.splitlines() if "CONSOLE" in line])


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_report_whole(report, tmp_path, width):
    (tmp_path / "report.html").write_text(report)
    said, console = browse(tmp_path / "report.html", width)
    assert console == []
    assert said["width"] == width and said["all"] <= width and said["wide"] == []
    assert said["empty"] == 0, "the moving curves were not drawn"
    assert said["small"] > 9, "text of a chart is too small to read"


class Balance(HTMLParser):
    """Every element that is opened is closed, in order."""

    void = {"meta", "link", "img", "input", "br", "line", "polyline", "polygon", "circle", "rect"}

    def __init__(self):
        super().__init__()
        self.stack, self.wrong = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void and self.stack.pop() != tag:
            self.wrong.append(tag)


def test_the_page_is_sound_and_holds_every_section_once_for_each_task(report):
    parser = Balance()
    parser.feed(report)
    assert parser.wrong == [] and parser.stack == []
    assert "runs/&lt;b&gt;" in report and "<b>runs" not in report
    for name in ("Headline", "Error against lead time", "Error budget", "Spectra", "Calibration",
                 "Conservation", "Physics probes", "Trajectories"):
        assert report.count(f"<h3>{name}</h3>") == 2
    assert report.count("class=card>") == 6 and report.count("class=film") == 3 * 5
    assert not re.search(r"https?://|\bnan\b|undefined", report)
    assert "train_operator.py --config runs/&lt;b&gt;/operator/config.json" in report


def test_a_roll_out_that_leaves_all_bounds_still_has_a_page():
    wild = written(lambda z, *args: 1e9 * z, [decaying(samples=2)]).partition("<script>")[0]
    assert wild.count("class=card>") == 3 and not re.search(r"Infinity|NaN|\bnan\b|\binf\b", wild)


def test_a_chart_puts_values_where_they_belong():
    svg = chart("t", [1, 2, 3], {"a": ("operator", [0.01, 0.1, 1.0], None, None)}, "x", "y",
                log=True)
    points = re.search(r'curve operator" points="([^"]*)"', svg)[1].split()
    x, y = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1]) and x[0] < x[2]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2) and y[0] > y[2]  # decades, upwards
    for tick in ("0.01", "0.1", "1"):
        assert f">{tick}</text>" in svg
    assert chart("t", [1], {"a": ("operator", [None], None, None)}, "x", "y") == ""


@pytest.mark.parametrize("value, text", [(0.0123, "0.0123"), (1.5, "1.50"), (0.00123, "1.23e-3"),
                                         (123.4, "123"), (12345.0, "1.23e4"), (0.0, "0"),
                                         (None, "&ndash;"), (float("inf"), "&ndash;")])
def test_numbers_are_short(value, text):
    assert number(value) == text
