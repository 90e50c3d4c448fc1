"""The report, as text and in a real browser where there is one."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
import types
from xml.etree import ElementTree

import pytest
from accelerate import Accelerator
from decaying import Generator, decaying, operator
from PIL import Image, ImageSequence

import evaluate
from ups.eval.metrics import DEFINITIONS
from ups.eval.plots import FILM
from ups.eval.report import cell, made_with, page
from ups.models.generators import Perturbed

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROBE = """<script>window.onload = () => { const wide = [...document.querySelectorAll('*')].filter(
e => !e.closest('.scroll, pre') && e.getBoundingClientRect().right > innerWidth + 1)
parent.postMessage(JSON.stringify({width: innerWidth, all: document.documentElement.scrollWidth,
wide: wide.map(e => e.outerHTML.slice(0, 80)), empty:
[...document.images].filter(e => !e.naturalWidth).length}), '*') }</script>"""
FRAME = """<!doctype html><title></title><iframe src=probe.html width={width} height=800
style=border:0></iframe><script>onmessage = e => {{ document.title = e.data }}</script>"""


@pytest.fixture(scope="module")
def report():
    """A page of a task in two dimensions, with ensembles."""
    draw = types.SimpleNamespace(model=Generator(), settings=types.SimpleNamespace(
        members=6, calls=1))
    return written(operator, decaying("ns2d", (12, 8)), diffusion=draw, consistency=draw)


def written(operator, task, **stages):
    stages = {"operator": types.SimpleNamespace(model=operator), **stages}
    result, pictures = evaluate.evaluate(Accelerator(cpu=True), evaluate.Config(), task, 0, stages,
                                         Perturbed(operator, [0.01]))
    about = {"run": "runs/<b>", "tasks": {task.name: result}, "steady": {},
             "definitions": DEFINITIONS,
             "evaluation": {"run": "runs/<b>", "calls": 0, "data": ("a b.h5", "c.h5")},
             "lineage": {"operator": "f00d"}, "config": {"operator": {"lr": 0.125}},
             "made_with": made_with(Accelerator())}
    return page(json.loads(json.dumps(about), parse_constant=lambda _: None),
                {task.name: pictures})


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_report_whole(report, tmp_path, width):
    """In a frame: a window of a headless browser cannot be as narrow as a phone."""
    (tmp_path / "probe.html").write_text(report.replace("</body>", PROBE + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900",
         "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title and title[1], done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    said = json.loads(html.unescape(title[1]))
    assert said["width"] == width and said["all"] <= width and said["wide"] == []
    assert said["empty"] == 0


def test_the_page_holds_every_section_once(report):
    assert "runs/&lt;b&gt;" in report and "<b>runs" not in report
    for name in ("Headline", "Error against lead time", "Spectra", "Calibration",
                 "Conservation of the mean of u", "Physics probes", "Trajectories: u"):
        assert report.count(f"<h3>{name}</h3>") == 1
    first = report.partition("<h2>")[0]
    assert re.search(r"CPU, processes: 1; commit (unknown|[0-9a-f]{7,}(-dirty)?); torch", first)
    assert "train_operator.py --config &#x27;runs/&lt;b&gt;/operator/config.json" in report
    assert "evaluate.py --run runs/again --data &#x27;a b.h5&#x27; c.h5</pre>" in report
    text = re.sub(r'base64,[^\'"]*', "", report)
    assert not re.search(r"https?://|\bnan\b|undefined|None", text)


def test_curves_are_vectors_and_fields_are_films_of_pixels(report):
    curves = re.findall(r"data:image/svg\+xml;base64,([^']*)", report)
    assert len(curves) == 1 + 2 + 3 + 6 + 1  # cost, errors, spectra, calibration, drift
    for curve in curves:
        assert ElementTree.fromstring(base64.b64decode(curve)).tag.endswith("}svg")
    film, = re.findall(r"alt='films' src='data:image/png;base64,([^']*)", report)
    frames = ImageSequence.all_frames(Image.open(io.BytesIO(base64.b64decode(film))))
    assert len({frame.tobytes() for frame in frames}) == min(FILM, 13) == len(frames)


def test_a_roll_out_that_leaves_all_bounds_still_has_a_page():
    wild = written(lambda z, *args: 1e9 * z, decaying("ns2d", (8, 6), samples=2))
    text = re.sub(r'base64,[^\'"]*', "", wild)
    assert "alt='films'" in text and not re.search(r"Infinity|NaN|\bnan\b|\binf\b", text)


@pytest.mark.parametrize("value, text", [(0.0123, "0.0123"), (1.5, "1.5"), (0.0000123, "1.23e-05"),
                                         (12345, "12,345"), (None, "&ndash;"),
                                         (float("inf"), "&ndash;")])
def test_numbers_are_short(value, text):
    assert cell(value) == text
