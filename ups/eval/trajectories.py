"""Pictures of the best, the median and the worst trajectory, still and moving, inside the page.

1-D: maps over space and time, and curves that move. 2-D and 3-D (its middle slice): some frames,
and films, which are one tall PNG each that a slider moves behind its window.
"""

import json
import math
from html import escape

import numpy as np

from ups.eval.charts import HEIGHT, LEFT, WIDTH, key, number, png
from ups.eval.plots import CHOICE

FILM, PIXELS, STILLS = 31, 96, 4  # frames of a film, its points per axis, still frames
NAMES = {"truth": "truth", "operator": "operator", "error": "error",
         "ensemble": "ensemble", "diffusion": "diffusion", "consistency": "student"}


def trajectories(result, pictures):
    """A card for each of the three trajectories."""
    spec, cards = pictures["spec"], []
    fields = {name: field.numpy() for name, field in pictures["fields"].items()
              if name != "guarded"}
    scores = [math.inf if score is None else score for score in
              result["forecasts"]["operator"]["nrmse_by_trajectory"]]
    scores = sorted(scores)[0], sorted(scores)[len(scores) // 2], sorted(scores)[-1]
    for i, choice in enumerate(CHOICE):
        most = 10 * np.abs(fields["truth"][i]).max()  # a roll-out may leave all bounds
        one = {name: np.nan_to_num(value[i], nan=most).clip(-most, most)
               for name, value in fields.items()}
        while one["truth"].ndim > 3:  # the middle slice
            one = {name: value[:, value.shape[1] // 2] for name, value in one.items()}
        one = {"truth": one["truth"], "operator": one["operator"],
               "error": one["operator"] - one["truth"]} | one
        params = ", ".join(f"{name} = {value:g}" for name, value in
                           zip(spec.params, pictures["params"][i].tolist(), strict=True))
        title = (f"<b>{choice}</b> nRMSE {number(scores[i])}, trajectory "
                 f"{int(pictures['chosen'][i])}{', ' if params else ''}{escape(params)}")
        draw = _curves if one["truth"].ndim == 2 else _films
        cards.append(f"<div class=card><div>{title}</div>{draw(one, spec)}</div>")
    return (f"<h3>Trajectories</h3><p>{escape(pictures['channel'])}: the best, the median and the "
            f"worst roll-out of the operator.</p><div class=cards>{''.join(cards)}</div>")


def _bounds(one, name):
    if name == "error" or name.endswith("spread"):
        most = max(np.abs(one[name]).max(), 1e-12)
        return (-most, most, "PuOr_r") if name == "error" else (0, most, "magma")
    low, high = one["truth"].min(), one["truth"].max()
    if low < 0 < high:  # zero is white
        low, high = -max(-low, high), max(-low, high)
        return low, high, "RdBu_r"
    return low, high, "viridis"


def _shown(one):
    """Fields that get a picture: the mean of an ensemble looks like the operator."""
    return [name for name in one if name in ("truth", "operator", "error") or " " in name]


def _label(one, name):
    first, _, rest = name.partition(" ")
    most = f" up to {number(float(np.abs(one[name]).max()), 2)}"
    return f"{NAMES[first]} {rest}" + (most if name == "error" or rest else "")


def _frames(count):
    """Some of `count` frames, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, FILM)).round().astype(int))


def _card(body, times, **data):
    data = json.dumps({"times": times, **data}, allow_nan=False)
    return (f"{body}<div class=play><button>play</button><input type=range min=0 step=1 "
            f"max={len(times) - 1} value={len(times) // 4} aria-label=time><output></output></div>"
            f"<script type=application/json>{data}</script>")


def _curves(one, spec):
    maps = "".join(f"<div>{_label(one, name)}<img alt='{escape(name)}' style='aspect-ratio:1' "
                   f"src='{png(one[name][::-1], *_bounds(one, name))}'></div>"
                   for name in _shown(one))
    frames = _frames(len(one["truth"]))
    names = [name for name in one if name != "error" and " " not in name]
    values = {name: one[name][frames] for name in names}
    low, high = one["truth"].min(), one["truth"].max()
    scale = (HEIGHT - 80) / max(high - low, 1e-12)

    def pixels(rows):
        return (HEIGHT - 50 - (rows - low) * scale).round(1).tolist()

    x = np.linspace(LEFT - 10, WIDTH - 4, one["truth"].shape[1]).round(1).tolist()
    data, extra = {"x": x, "curves": {n: pixels(values[n]) for n in names}}, ""
    spreads = [name for name in one if " " in name]
    if spreads:  # two deviations around the mean of the last ensemble
        own, spread = spreads[-1].split()[0], one[spreads[-1]][frames]
        high_low = values[own] + 2 * spread, (values[own] - 2 * spread)[:, ::-1]
        data["band"] = pixels(np.concatenate(high_low, 1))
        extra = f"<polygon class='band {own}' />"
    for level in (low, high):
        extra += (f"<text x={LEFT - 14} y={pixels(level) + 4} text-anchor=end>"
                  f"{number(float(level), 2)}</text>")
    lines = "".join(f"<polyline class='curve {name}' />" for name in names)
    keys = "".join(key(name, NAMES[name]) for name in names)
    band = f"<small>band: two deviations of the {NAMES[own]}'s members</small>" if spreads else ""
    body = (f"<div class=maps>{maps}</div><small>x to the right, time upwards</small>"
            f"<svg viewBox='0 0 {WIDTH} {HEIGHT - 30}' role=img aria-label='moving curves'>{extra}"
            f"{lines}</svg><div class=legend>{keys}{band}</div>")
    return _card(body, [f"{spec.dt * k:.3g}" for k in frames], **data)


def _films(one, spec):
    frames = _frames(len(one["truth"]))
    stills = frames[np.linspace(0, len(frames) - 1, min(len(frames), STILLS)).astype(int)]
    thin = -(-max(one["truth"].shape[1:]) // PIXELS)
    films = pictures = ""
    for name in _shown(one):
        film = one[name][frames][:, ::-1][:, ::thin, ::thin]
        tall = png(film.reshape(-1, film.shape[2]), *_bounds(one, name))
        films += (f"<div>{_label(one, name)}<div class=film style=\"aspect-ratio:{film.shape[2]}/"
                  f"{film.shape[1]};background-size:100% {len(frames)}00%;background-image:"
                  f"url({tall})\"></div></div>")
        rows = "".join(f"<div>t = {spec.dt * k:.3g}<img alt='{escape(name)}' "
                       f"src='{png(one[name][k][::-1], *_bounds(one, name))}'></div>"
                       for k in stills)
        pictures += f"<small>{_label(one, name)}</small><div class='maps stills'>{rows}</div>"
    card = _card(f"<div class=maps>{films}</div>", [f"{spec.dt * k:.3g}" for k in frames])
    return f"{card}<details open><summary>Frames side by side</summary>{pictures}</details>"
