"""Figures: what each stage leaves as a picture, and those of the report.

A quantity has one colour map in a figure. Where it changes sign it is red and blue, zero is white,
and so is its error; else it goes from dark to bright, and so does the size of its error. A spread
is never negative: it goes from dark, zero, to bright.
"""

import io

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
    except (ImportError, OSError) as error:
        print(f"no picture: {error}")


def render(draw, *args, kind="png"):
    """A figure as the bytes of a file."""
    from matplotlib.figure import Figure

    figure, file = Figure(layout="constrained"), io.BytesIO()
    draw(figure, *args)
    figure.savefig(file, format=kind, dpi=110)
    return file.getvalue()


# parts
def curves(axis, x, lines, level=None, **settings):
    """Lines {label: (colour, values, low, high)}, the last two of a band or None; a dashed level.

    None among the values is a gap. `settings` are those of the axis.
    """
    for label, (colour, values, *band) in lines.items():
        values = np.array(values, dtype=float)
        dots = "o" if np.isfinite(values).sum() == 1 else None
        axis.plot(x, values, color=colour, marker=dots, lw=1.6, label=label)
        if band and band[0] is not None:
            low, high = (np.array(ends, dtype=float) for ends in band)
            axis.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    if level is not None:
        axis.axhline(level, color="0.5", lw=1, ls="--")
    axis.set(**settings)
    axis.grid(alpha=0.25)
    if "xticks" in settings:
        axis.minorticks_off()
    elif isinstance(x, range):  # steps
        axis.locator_params("x", integer=True)
    if len(lines) > 1:
        axis.legend(fontsize=8)


def panels(figure, facts, rows, columns, apart=False, across=False):
    """Fields in a grid: `rows` are (label, values (K, ..), quantity), `columns` {title: index in
    K}. Returns the images with their values.

    Rows of a quantity share limits and a bar: those of "field" are the first row's, "error" is
    that of the first row's quantity, and "spread" begins at zero. With `apart` each column has its
    own. `across` swaps rows and columns.
    """
    shape = (len(columns), len(rows)) if across else (len(rows), len(columns))
    axes = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    grid, index, images = axes.T if across else axes, [*columns.values()], []
    bound = 10 * np.abs(rows[0][1]).max() + 1e-12
    signed = {row[2]: bool(row[1].min() < 0 < row[1].max()) for row in reversed(rows)}
    signed["error"] = signed[rows[0][2]]
    for part in [[k] for k in range(len(index))] if apart else [[*range(len(index))]]:
        for quantity in dict.fromkeys(row[2] for row in rows):
            same = [k for k, row in enumerate(rows) if row[2] == quantity]
            values = [rows[k][1] for k in same]
            if quantity in ("field", "error"):  # a roll-out may leave all bounds
                values = [np.nan_to_num(v, nan=bound).clip(-bound, bound) for v in values]
            seen = [v[index[part[0]]] if apart else v for v in values]
            seen = seen[:1] if quantity == "field" else seen
            low, high = min(v.min() for v in seen), max(v.max() for v in seen)
            if signed[quantity]:
                low, high = -max(-low, high, 1e-12), max(-low, high, 1e-12)
            elif quantity in ("error", "spread"):
                low, high, values = 0.0, max(-low, high, 1e-12), [np.abs(v) for v in values]
            for k, u in zip(same, values, strict=True):
                for column in part:
                    image = _field(grid[k, column], u[index[column]], facts, vmin=low, vmax=high,
                                   cmap="RdBu_r" if signed[quantity] else "viridis")
                    images.append((image, u))
            bar = figure.colorbar(image, ax=grid[same][:, part].ravel().tolist(), pad=0.02,
                                  location="bottom" if across else "right",
                                  aspect=25 * len(same))
            bar.ax.locator_params(nbins=4)
    names = [f"|{name}|" if quantity == "error" and not signed["error"] and u.min() < 0 else name
             for name, u, quantity in rows]
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


def points(facts):
    """The x of each point of one axis."""
    (low, high), (n,) = facts.domain[0], facts.grid
    return low + (np.arange(n) + 0.5) * (high - low) / n


# roll-outs
def draw_rollouts(figure, facts, fields, tables):
    """Best, median and worst trajectory, and how the error grows with the lead time."""
    errors = {name: table["nrmse"].nanmean(2).numpy() for name, table in tables.items()}
    scores = np.sort(errors["operator"].mean(1))[[0, len(errors["operator"]) // 2, -1]]
    line = len(facts.grid) == 1
    figure.set_size_inches(14, 8 if line else 6.8)
    figure.suptitle(f"{facts.name}: {facts.channels[0]}, rolled out from the first frame (t = 0), "
                    "test split")
    left, right = figure.subfigures(1, 2, width_ratios=(2.6, 1))
    draw_trajectories(left, facts, {name: u.numpy() for name, u in fields.items()}, scores)
    axes = right.subplots(1 + line, squeeze=False)[:, 0]
    for part, colour in ((0.0, "0.6"), (0.25, "C0"), (1.0, "C3")) if line else ():
        frame = round(part * (facts.frames - 1))
        for name, style in (("truth", {}), ("operator", {"lw": 2.4, "ls": ":"})):
            axes[0].plot(points(facts), fields[name][1, frame], color=colour, **style,
                         label=f"t = {frame * facts.dt:.3g}" if name == "truth" else None)
        axes[0].set(title="median: truth (line), operator (dots)", xlabel=facts.axes[0])
        axes[0].legend(fontsize=8)
    lines = {}
    for name in ("persistence", "operator", "codec"):
        values = np.maximum(errors[name], 1e-12)
        lines[name] = COLOURS[name], values.mean(0), *np.quantile(values, (0.1, 0.9), axis=0)
    colour, floor, *band = lines.pop("codec")
    if floor.max() > lines["operator"][1].min() / 30:  # else it would press the others together
        lines["codec floor"] = colour, floor, *band
    else:
        lines[f"codec floor: {floor.mean():.0e}, below"] = colour, [None] * len(floor)
    curves(axes[-1], range(1, facts.frames), lines, title="error (band: 10 to 90 %)",
           xlabel="step", ylabel="nRMSE", yscale="log")


def draw_trajectories(figure, facts, fields, scores):
    """Fields (3, T, *grid) of the best, the median and the worst trajectory over x and time; of
    two axes and more the median at some times."""
    if len(facts.grid) == 1:
        columns = {f"{CHOICE[k]} (nRMSE {scores[k]:.2g})": k for k in range(3)}
        panels(figure, facts, _rows(fields), columns, apart=True)
    else:
        figure.suptitle(f"median trajectory (nRMSE {scores[1]:.2g})", fontsize=10)
        _in_time(figure, facts, _rows({name: u[1] for name, u in fields.items()}), 5)


def _in_time(figure, facts, rows, count, first=0, **how):
    """Panels of rows (label, (T, *grid), quantity): over x and time, or at some times."""
    if len(facts.grid) == 1:
        return panels(figure, facts, [(name, u[None], kind) for name, u, kind in rows], {"": 0},
                      **how)
    frames = np.unique(np.linspace(first, facts.frames - 1, count).round().astype(int))
    return panels(figure, facts, rows, {f"t = {k * facts.dt:.3g}": k for k in frames}, **how)


def _rows(fields):
    """Rows of `panels`; the means of ensembles look like the operator, so their spreads."""
    spreads = [(f"spread of\n{LABELS.get(name[:-7], name[:-7])}", u, "spread")
               for name, u in fields.items() if name.endswith(" spread")]
    return [("truth", fields["truth"], "field"), ("operator", fields["operator"], "field"),
            ("error", fields["operator"] - fields["truth"], "error"), *spreads]


def film(facts, fields):
    """One trajectory {name: (T, *grid)} in motion: an animated PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure, frames, file = Figure((4.6, 2.6), 110, layout="constrained"), [], io.BytesIO()
    canvas, title = FigureCanvasAgg(figure), figure.suptitle(" ", fontsize=9)
    images = panels(figure, facts, _rows(fields)[:3], {"": 0}, across=True)
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
    facts, times = fields.facts, fields.files[0].times[list(fields.frames)]
    if len(facts.grid) == 1:
        u = fields.read(range(min(4, len(fields)))).numpy().swapaxes(1, 2)  # (K, C, T, x)
        columns = {f"trajectory {k}": k for k in range(len(u))}
    else:
        step = slice(int(facts.steady), None, max(1, (facts.frames - 1) // 4))
        u = fields.read([0], step).numpy()[0]
        columns = {f"t = {t:.3g}": k for k, t in enumerate(times[step])}
    figure.set_size_inches(2.4 * len(columns) + 1, 2.2 * u.shape[1] + 0.6)
    panels(figure, facts, [(name, u[:, c], name) for c, name in enumerate(facts.channels)], columns)


def draw_ensemble(figure, facts, truth, members):
    """One trajectory (T, *grid) and members (T, M, *grid): truth, four of them and the spread of
    all, over x and time or at some times; below, the fan of a point over time."""
    truth, members = truth.float().numpy(), members.float().numpy()
    shown, times = min(4, members.shape[1]), facts.dt * np.arange(len(truth))
    tall = 2.6 if truth.ndim == 2 else 7.6
    figure.set_size_inches(14, tall + 3.6)
    figure.suptitle(f"{facts.name}: {facts.channels[0]} of a test trajectory")
    above, below = figure.subfigures(2, height_ratios=(tall + 0.4, 3.2))
    _in_time(above, facts, [("truth", truth, "field"), *(
        (f"member {m + 1}", members[:, m], "field") for m in range(shown)),
        ("spread", members.std(1, ddof=1), "spread")], 3, first=1, across=True)
    middle, axis = tuple(n // 2 for n in truth.shape[1:]), below.subplots()
    fan = members[(slice(None), slice(None), *middle)]
    curves(axis, times, {
        "mean of the members, 5 to 95 %": ("C0", fan.mean(1), *np.percentile(fan, (5, 95), 1)),
        "truth": ("black", truth[(slice(None), *middle)])}, xlabel="time",
        ylabel=facts.channels[0], title=f"the point in the middle, {members.shape[1]} members")
    axis.plot(times, fan[:, :shown], color="C0", lw=0.7)


def draw_steady(figure, facts, inputs, truth, members, scores):
    """Best, median and worst sample; inputs (3, E, *grid) or None, truth (3, C, *grid), members
    (3, M, C, *grid), of which the first channel is shown."""
    truth, members = truth[:, 0].float().numpy(), members[:, :, 0].float().numpy()
    mean, spread = members.mean(1), members.std(1, ddof=1)
    columns = {f"{CHOICE[k]} (nRMSE {scores[k]:.2g})": k for k in range(3)}
    figure.suptitle(f"{facts.name}: {facts.channels[0]}, {members.shape[1]} members, test split")
    given = [] if inputs is None else [(f"input {facts.inputs[0]}", inputs[:, 0].numpy(), "input")]
    figure.set_size_inches(10, 2.2 * (5 + len(given)) if truth.ndim > 2 else 4)
    if truth.ndim > 2:
        panels(figure, facts, [("solution", truth, "field"), ("mean", mean, "field"),
                               ("one member", members[:, 0], "field"), ("spread", spread, "spread"),
                               ("error of the mean", mean - truth, "error"), *given], columns, True)
        return
    for k, (title, axis) in enumerate(zip(columns, figure.subplots(1, 3), strict=True)):
        ends = mean[k] - 2 * spread[k], mean[k] + 2 * spread[k]
        curves(axis, points(facts), {"solution": ("black", truth[k]), "one member": (
            "C1", members[k, 0]), "mean, two deviations": ("C0", mean[k], *ends)}, title=title,
               xlabel=facts.axes[0])


def draw_codec(figure, facts, u, grid, patch):
    """A trajectory (T, C, *grid), what the learned codec makes of it, and both codecs' errors."""
    u, grid, patch = (t[:, 0].float().cpu().numpy() for t in (u, grid, patch))
    figure.set_size_inches(11, 8)
    _in_time(figure, facts, [("field", u, "field"), ("grid codec", grid, "field"),
                             ("its error", grid - u, "error"),
                             ("error of the\npatch codec", patch - u, "error")], 3)
