"""Pictures of roll-outs: which errors the last panel shows, whatever they are."""

import math
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from ups.eval.plots import draw_rollouts


@pytest.mark.parametrize("grid", [(8,), (8, 6)])
@pytest.mark.parametrize("operator, codec, bottom", [
    (0.3, 1e-7, 0.01),        # a lossless codec is named, and its line left out
    (0.3, 0.1, None),         # a floor that can be seen
    (math.inf, 1e-7, None),   # a roll-out that left all bounds
    (0.0, 1e-7, None),
])
def test_the_floor_of_the_codec_does_not_squeeze_the_other_errors(grid, operator, codec, bottom):
    spec = SimpleNamespace(name="burgers1d", grid=grid, domain=[(0.0, 1.0)] * 2, dt=0.1,
                           channels=("u",))
    fields = torch.rand(3, 5, *grid, generator=torch.Generator().manual_seed(0))
    shown = {"truth": fields, "operator": fields + 0.1}
    tables = {name: {"nrmse": torch.full((6, 4, 1), value)} for name, value in
              (("operator", operator), ("codec", codec), ("persistence", 0.5))}
    figure = Figure(layout="constrained")
    draw_rollouts(figure, spec, shown, tables)
    figure.draw_without_rendering()
    axis = next(axis for axis in figure.axes if axis.get_title().startswith("error (band"))
    floor = axis.get_legend().get_texts()[-1].get_text()
    if bottom:
        assert axis.get_ylim()[0] == pytest.approx(bottom, rel=1e-5) and floor.endswith(": 1e-07")
    else:
        assert axis.get_ylim()[0] < codec
