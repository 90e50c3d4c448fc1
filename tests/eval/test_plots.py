"""Pictures: which axes, scales and errors they show."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from factual import facts
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from ups.eval.plots import (
    draw_costs,
    draw_ensemble,
    draw_rollouts,
    film,
    panels,
    picture,
    render,
)


@pytest.mark.parametrize("grid, operator, codec", [((8, 6), math.inf, 1e-7),
                                                   ((8,), 0.0, 0.1)])
def test_the_floor_of_the_codec_does_not_squeeze_the_other_errors(grid, operator, codec):
    """The line of a lossless codec lies below the axis."""
    fields = np.random.default_rng(0).normal(size=(3, 5, *grid))
    shown = {"truth": fields, "operator": fields + (0.1 if operator < 1 else operator)}
    figure = Figure(layout="constrained")
    draw_rollouts(figure, facts("burgers1d", grid, ("u",), 5), shown, {
        name: np.full((6, 4), value) for name, value in
        (("operator", operator), ("codec", codec), ("persistence", 0.5))})
    figure.draw_without_rendering()
    axis = next(axis for axis in figure.axes if axis.get_title().startswith("error (band"))
    low, high = axis.get_ylim()
    assert low < 0.5 < high and (low > 0.005 if codec < 0.01 else low < codec)


def test_a_picture_has_x_to_the_right_one_map_of_colours_and_shared_scales():
    truth = np.arange(48.0).reshape(1, 8, 6)  # (x, y), all above zero
    for axes, signed in ((("x", "y"), False), (("y", "x"), True)):
        spec = replace(facts("toy", (8, 6), ("u",), 2), axes=axes)
        u = truth - 24 * signed
        figure = Figure()
        images = panels(figure, spec, [("truth", u, "field"), ("p", u - 2, "field"),
                                       ("error", 0 * u - 2, "error")], {"": 0})
        shown = [image for image, _ in images]
        assert len({image.get_cmap().name for image in shown}) == 1
        ends = (-24.0, 24.0) if signed else (0.0, 47.0)
        assert shown[0].get_clim() == shown[1].get_clim() == ends
        assert shown[2].get_clim() == ((-2.0, 2.0) if signed else (0.0, 2.0))
        assert np.array_equal(shown[0].get_array(), u[0] if signed else u[0].T)
        last = shown[2].axes
        assert last.get_xlabel() == "x" and last.get_ylabel() == ("error\ny" if signed
                                                                  else "|error|\ny")


def test_nothing_is_cut_off_at_the_edge_of_one_row():
    spec, u = facts("toy", (8, 8), ("u",), 5), np.random.default_rng(0).normal(size=(5, 8, 8))
    data = render(panels, spec, [("u", u, "field")], {f"t = {k}": k for k in range(5)})
    pixels = np.array(Image.open(io.BytesIO(data)).convert("L"))
    assert all((edge == 255).all() for edge in (pixels[:3], pixels[-3:]))


def test_costs_that_are_alike_have_ticks_apart_and_a_single_step_takes_one_row():
    figure = Figure()
    draw_costs(figure, "costs", {"a": (4.9e-4, 0.98), "b": (5.1e-4, 0.97), "lost": (1, math.inf)})
    axis, = figure.axes
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["a", "b"]
    assert all(high > 10 * low for low, high in (axis.get_xlim(), axis.get_ylim()))
    assert not any(tick.label1.get_visible() for tick in axis.xaxis.get_minor_ticks())
    for frames, height in ((2, 5.2), (9, 9.6)):
        draw_ensemble(figure := Figure(), facts("toy", (8, 6), ("u",), frames),
                      torch.rand(frames, 8, 6), torch.rand(frames, 3, 8, 6))
        assert figure.get_size_inches()[1] == pytest.approx(height)


@pytest.mark.parametrize("grid", [(8,), (8, 6)])
def test_a_name_is_no_formula(tmp_path, capsys, grid):
    spec, u = facts("a$b$", grid, (r"$\no$",), 3), np.random.default_rng(0).random((3, 3, *grid))
    spec = replace(spec, axes=(r"$\no$", "y")[:len(grid)])
    errors, found = dict.fromkeys(("operator", "persistence"), np.full((3, 2), 0.1)), []

    def draw(figure):
        draw_rollouts(figure, spec, {"truth": u, "operator": u}, errors)
        found.append(figure)

    picture(tmp_path / "a.png", draw)
    assert "picture: " in capsys.readouterr().out and (tmp_path / "a.png").exists()
    formulas = {text.get_text() for text in found[0].findobj(Text) if "$" in text.get_text()
                and text.get_parse_math()}
    assert formulas and all("mathdefault" in text for text in formulas)  # ticks of the error
    if len(grid) == 2:
        assert film(spec, {"truth": u, "operator": u}, np.ones(3))
