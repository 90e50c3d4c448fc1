"""Figures: what each stage leaves as a picture, and those of the report.

A quantity has one colour map in a figure. Where it changes sign it is red and blue, zero is white,
and so is its error; else it goes from dark to bright, and so does the size of its error. A spread
is never negative: it goes from dark, zero, to bright.
"""

import io
import itertools

import numpy as np

from ups.eval.forecasts import LABELS

CHOICE = ("best", "median", "worst")
COLOURS = {"truth": "black", "operator": "C0", "ensemble": "C3", "diffusion": "C1",
           "consistency": "C4", "perturbed": "C8", "dressing": "C9", "codec": "C2",
           "persistence": "0.5", "mean": "C5"}
FILM = 16  # frames of a film, at most


def picture(path, draw, *args):
    """Draw into a file, by `draw(figure, *args)`, where that can be done."""
    try:
        path.write_bytes(render(draw, *args))
        print(f"picture: {path}")
    except (ImportError, OSError, ValueError) as error:  # it must not cost the run
        print(f"no picture: {error}")


def render(draw, *args, kind="png"):
    """A figure as the bytes of a file."""
    from matplotlib.figure import Figure

    figure, file = Figure(layout="constrained"), io.BytesIO()
    draw(figure, *args)
    no_formulas(figure)
    figure.savefig(file, format=kind, dpi=110, bbox_inches="tight")
    return file.getvalue()


def no_formulas(figure):
    """Names are words: `$` is a dollar. Ticks, which have no text before they are drawn, may be."""
    for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
        text.set_parse_math(not text.get_text())


# parts
def curves(axis, x, lines, level=None, **settings):
    """Lines {label: (colour, values, low, high)}, the last two of a band if any; a dashed level.

    `settings` are those of the axis.
    """
    for label, (colour, *values) in lines.items():
        values, *band = (np.array(part, dtype=float) for part in values)
        dots = "o" if np.isfinite(values).sum() == 1 else None
        axis.plot(x, values, color=colour, marker=dots, lw=1.6, label=label)
        if band:
            axis.fill_between(x, *band, color=colour, alpha=0.15, lw=0)
    if level is not None:
        axis.axhline(level, color="0.5", lw=1, ls="--")
    axis.set(**settings)
    axis.grid(alpha=0.25)
    if "xticks" in settings:
        axis.minorticks_off()
    elif len(x) == 1:
        axis.set_xticks(x)
    elif isinstance(x, range):  # steps
        axis.locator_params("x", integer=True)
    if len(lines) > 1:
        axis.legend(fontsize=8)


def draw_costs(figure, title, points, solver=0.0):
    """Errors over the seconds of a trajectory: points {label: (seconds, error)}; those of a solver
    without an error."""
    axis = figure.subplots()
    for label, (seconds, error) in points.items():
        if error is not None and np.isfinite(error):
            axis.loglog(seconds, max(error, 1e-7), "o", label=label)
    if solver:
        axis.axvline(solver, color="0.5", lw=1, ls="--", label="solver")
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    axis.set(xlabel="seconds of a trajectory, in a batch", ylabel="nRMSE", title=title,
             xlim=(left / 4, 4 * right), ylim=(low / 4, 4 * high))  # a decade at least
    axis.tick_params(which="minor", labelbottom=False, labelleft=False)
    if axis.lines:
        axis.legend(fontsize=8)
    axis.grid(alpha=0.25)


def panels(figure, facts, rows, columns, apart=False, across=False, frame=None):
    """Fields in a grid: `rows` are (label, values (K, ..), quantity), `columns` {title: index in
    K}. Returns the images with their values. With `frame`, values are (K, T, ..), and it is shown.

    Rows of a quantity share limits and a bar: those of "field" are the first row's, "error" is
    that of the first row's quantity, and "spread" begins at zero. With `apart` each column has its
    own. `across` swaps rows and columns.
    """
    shape = (len(columns), len(rows)) if across else (len(rows), len(columns))
    if hasattr(figure, "set_size_inches"):
        figure.set_size_inches(2.6 * shape[1] + 1, 2.2 * shape[0] + 0.6)
    axes = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    grid, index, images = axes.T if across else axes, [*columns.values()], []
    signed = {kind: bool(u.min() < 0 < u.max()) for _, u, kind in reversed(rows)}
    signed["error"] = signed[rows[0][2]]
    if not signed["error"]:  # its size
        rows = [(f"|{name}|", np.abs(u), kind) if kind == "error" and u.min() < 0 else
                (name, u, kind) for name, u, kind in rows]
    parts = [[k] for k in range(len(index))] if apart else [[*range(len(index))]]
    for part, quantity in itertools.product(parts, dict.fromkeys(kind for *_, kind in rows)):
        same = [k for k, row in enumerate(rows) if row[2] == quantity]
        seen = [rows[k][1][index[part[0]]] if apart else rows[k][1] for k in same]
        seen = seen[:1] if quantity == "field" else seen
        low, high = min(u.min() for u in seen), max(u.max() for u in seen)
        if signed[quantity]:
            low, high = -max(-low, high, 1e-12), max(-low, high, 1e-12)
        elif quantity in ("error", "spread"):
            low, high = 0.0, max(high, 1e-12)
        for k, column in itertools.product(same, part):
            u = rows[k][1][index[column]]
            image = _field(grid[k, column], u if frame is None else u[frame], facts, vmin=low,
                           vmax=high, cmap="RdBu_r" if signed[quantity] else "viridis")
            images.append((image, u))
        bar = figure.colorbar(image, ax=grid[same][:, part].ravel().tolist(), pad=0.02,
                              location="bottom" if across else "right", aspect=25 * len(same))
        bar.ax.locator_params(nbins=4)
    names = [row[0] for row in rows]
    above, beside = (names, columns) if across else (columns, names)
    for axis, title in zip(axes[0], above, strict=True):
        axis.set_title(title)
    for axis, title in zip(axes[:, 0], beside, strict=True):
        axis.set_ylabel(f"{title}\n{axis.get_ylabel()}".strip())
    for axis in axes.flat:
        axis.label_outer()
    return images


def _field(axis, u, facts, **colours):
    """A field over space, or (T, x) over x and time, with the axes that it has."""
    names, domain = list(facts.axes[-2:]), list(facts.domain[-2:])
    if len(names) == 1:
        half = 0.5 * facts.dt
        names, domain = ["time", *names], [(-half, facts.dt * len(u) - half), *domain]
    if names[0] == "x":
        names, domain = names[::-1], domain[::-1]
    image = axis.imshow(plane(u, facts), origin="lower", extent=(*domain[1], *domain[0]),
                        interpolation="nearest", **colours,
                        aspect="auto" if names[0] == "time" else "equal")
    axis.set(xlabel=names[1], ylabel=names[0])
    axis.locator_params(nbins=3)
    return image


def plane(u, facts):
    """What is seen of a field: of three axes the middle slice; x to the right."""
    u = u[len(u) // 2] if u.ndim > 2 else u
    return u.T if len(facts.axes) > 1 and facts.axes[-2] == "x" else u


# roll-outs
def draw_rollouts(figure, facts, fields, errors):
    """Best, median and worst trajectory over x and time, or the median at some times; how errors
    {name: (n, T - 1)} grow with the lead time. Fields are {name: (3, T, *grid)}."""
    line, rows, scores = len(facts.grid) == 1, _rows(fields), three(errors["operator"])
    figure.set_size_inches(14, (2.7 if line else 2.3) * len(rows))
    figure.suptitle(f"{facts.name}: {facts.channels[0]}, test split")
    left, right = figure.subfigures(1, 2, width_ratios=(2.6, 1))
    if line:
        panels(left, facts, rows, _named(scores), apart=True)
    else:
        left.suptitle(f"median trajectory (nRMSE {scores[1]:.2g})", fontsize=10)
        _in_time(left, facts, [(name, u[1], kind) for name, u, kind in rows], 5)
    axes = right.subplots(1 + line, squeeze=False)[:, 0]
    (low, high), n = facts.domain[0], facts.grid[0]
    x = low + (np.arange(n) + 0.5) * (high - low) / n
    for part, colour in ((0.0, "0.6"), (0.25, "C0"), (1.0, "C3")) if line else ():
        frame = round(part * (facts.frames - 1))
        axes[0].plot(x, rows[0][1][1, frame], color=colour, label=f"t = {frame * facts.dt:.3g}")
        axes[0].plot(x, rows[1][1][1, frame], color=colour, lw=2.4, ls=":")
        axes[0].set(title="median: truth (line), operator (dots)", xlabel=facts.axes[0])
        axes[0].legend(fontsize=8)
    errors = {name: np.clip(e, 1e-12, 1e12) for name, e in errors.items()}
    curves(axes[-1], range(1, facts.frames), {
        LABELS[name]: (COLOURS[name], e.mean(0), *np.quantile(e, (0.1, 0.9), axis=0))
        for name, e in errors.items()}, title="error (band: 10 to 90 %)", xlabel="step",
           ylabel="nRMSE", yscale="log")
    least = min(errors[name].min() for name in ("persistence", "operator")) / 30
    axes[-1].set_ylim(bottom=max(axes[-1].get_ylim()[0], least))  # of a codec that loses less


def three(errors):
    """Of errors (n, T - 1): the least, the median and the largest of a trajectory."""
    return np.sort(errors.mean(1))[[0, len(errors) // 2, -1]]


def _named(scores):
    return {f"{choice} (nRMSE {score:.2g})": k
            for k, (choice, score) in enumerate(zip(CHOICE, scores, strict=True))}


def _in_time(figure, facts, rows, count, first=0, **how):
    """Panels of rows (label, (T, *grid), quantity): over x and time, or at some times."""
    if len(facts.grid) == 1:
        return panels(figure, facts, [(name, u[None], kind) for name, u, kind in rows], {"": 0},
                      **how)
    frames = np.unique(np.linspace(first, facts.frames - 1, count).round().astype(int))
    return panels(figure, facts, rows, {f"t = {k * facts.dt:.3g}": k for k in frames}, **how)


def _rows(fields):
    """Rows of `panels`; the means of ensembles look like the operator, so their spreads."""
    truth, p, *_ = fields.values()
    bound = 10 * np.abs(truth).max() + 1e-12  # a roll-out may leave all bounds
    p = np.nan_to_num(p, nan=bound).clip(-bound, bound)
    return [("truth", truth, "field"), ("operator", p, "field"), ("error", p - truth, "error"),
            *((f"spread of\n{LABELS[name[:-7]]}", u, "spread") for name, u in fields.items()
              if name.endswith(" spread"))]


def film(facts, fields, scores):
    """The three trajectories {name: (3, T, *grid)} in motion: an animated PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure, frames, file = Figure(dpi=90, layout="constrained"), [], io.BytesIO()
    canvas, title = FigureCanvasAgg(figure), figure.suptitle(" ", fontsize=10)
    images = panels(figure, facts, _rows(fields)[:3], _named(scores), apart=True, frame=0)
    no_formulas(figure)
    canvas.draw()
    still = canvas.copy_from_bbox(figure.bbox)  # what does not move is drawn once
    for k in np.unique(np.linspace(0, facts.frames - 1, FILM).round().astype(int)):
        canvas.restore_region(still)
        title.set_text(f"t = {k * facts.dt:.3g}")
        for image, u in images:
            image.set_data(plane(u[k], facts))
        for artist in (title, *(image for image, _ in images)):
            artist.draw(canvas.get_renderer())
        frames.append(Image.fromarray(np.array(canvas.buffer_rgba())))
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:], duration=250, loop=0)
    return file.getvalue()


# data and other stages
def draw_data(figure, fields):
    """Each channel in a row: four trajectories over (x, t), or five frames of the first."""
    facts = fields.facts
    if len(facts.grid) == 1 and not facts.steady:
        u = fields.read(range(min(4, len(fields)))).numpy()
        panels(figure, facts, [(name, u[:, :, c], name) for c, name in enumerate(facts.channels)],
               {f"trajectory {k}": k for k in range(len(u))})
    else:
        u = fields.read([0]).numpy()[0]
        _in_time(figure, facts, [(name, u[:, c], name) for c, name in enumerate(facts.channels)],
                 5, first=int(facts.steady))


def draw_ensemble(figure, facts, truth, members):
    """One trajectory (T, *grid) and members (T, M, *grid): truth, four of them and the spread of
    all, over x and time or at some times; below, the fan of all in the middle of the domain."""
    truth, members = truth.float().numpy(), members.float().numpy()
    figure.suptitle(f"{facts.name}: {facts.channels[0]} of a test trajectory, {members.shape[1]} "
                    "members")
    height = 2.2 * (1 if len(facts.grid) == 1 else min(3, facts.frames - 1)) + 0.6
    figure.set_size_inches(16.6, height + 2.4)
    above, below = figure.subfigures(2, 1, height_ratios=(height, 2.4))
    rows = [(f"member {m + 1}", u, "field") for m, u in enumerate(members.swapaxes(0, 1)[:4])]
    _in_time(above, facts, [("truth", truth, "field"), *rows,
                            ("spread", members.std(1, ddof=1), "spread")], 3, 1, across=True)
    middle = tuple(n // 2 for n in facts.grid)
    fan = members[(slice(None), slice(None), *middle)]  # (T, M)
    curves(below.subplots(), facts.dt * np.arange(len(fan)), {
        "truth": ("black", truth[(slice(None), *middle)]),
        "members: median, 5 to 95 %": ("C3", *np.quantile(fan, (0.5, 0.05, 0.95), axis=1))},
           title="in the middle of the domain", xlabel="time", ylabel=facts.channels[0])


def draw_steady(figure, facts, inputs, truth, members, scores):
    """Best, median and worst sample; inputs (3, E, *grid) or None, truth (3, C, *grid), members
    (3, M, C, *grid), of which the first channel is shown; a field of one axis as a strip."""
    truth, members = truth[:, 0].float().numpy(), members[:, :, 0].float().numpy()
    figure.suptitle(f"{facts.name}: {facts.channels[0]}, {members.shape[1]} members, test split")
    mean = members.mean(1)
    rows = [("solution", truth, "field"), ("mean", mean, "field"),
            ("one member", members[:, 0], "field"), ("spread", members.std(1, ddof=1), "spread"),
            ("error of\nthe mean", mean - truth, "error")]
    if inputs is not None:
        rows.append((f"input {facts.inputs[0]}", inputs[:, 0].numpy(), "input"))
    if truth.ndim == 2:
        rows = [(name, u[:, None], kind) for name, u, kind in rows]
    panels(figure, facts, rows, _named(scores), apart=True)


def draw_codec(figure, facts, u, grid, patch):
    """A trajectory (T, C, *grid), what the learned codec makes of it, and both codecs' errors."""
    u, grid, patch = (t[:, 0].float().cpu().numpy() for t in (u, grid, patch))
    _in_time(figure, facts, [("field", u, "field"), ("grid codec", grid, "field"),
                             ("its error", grid - u, "error"),
                             ("error of the\npatch codec", patch - u, "error")], 3)
