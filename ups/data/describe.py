"""`inspect`: one file in words, measured on at most 64 trajectories, and a picture of a few."""

import shlex
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.check import SEAM, seam
from ups.data.fields import SPLITS, Fields
from ups.data.file import pieces
from ups.data.pdebench import open_pdebench, uneven

PICTURES = (".png", ".pdf", ".svg", ".jpg")


def describe(path):
    """Everything a reader needs to know of a file, as text."""
    file = open_pdebench(path)
    task = file.facts
    steady = task.steady
    rows = np.unique(np.linspace(0, file.samples - 1, 64).astype(int))
    lines = [("equation", task.equation),
             ("parameters", ", ".join(f"{key} = {value:g}" for key, value in
                        zip(task.params, file.params[0], strict=True))
              or "none that differ between files"),
             ("samples", f"{_count(file.samples)} of {', '.join(file.facts.channels)}: "
                         f"{_splits(file, task)}")]
    wrong = uneven(file)
    if steady:
        lines += [("time", "none: a is given, u is the answer")]
    else:
        start, stop = file.times[[0, -1]]
        note = f"; training starts at frame {task.first_frame}" if task.first_frame else ""
        lines += [("time", f"{file.facts.frames} frames, t = {start:g} to {stop:g}, dt = "
                           f"{(stop - start) / max(1, file.facts.frames - 1):g}{note}"
                           + (f"; it {wrong['t']}" if "t" in wrong else ""))]
    for axis, (lo, hi), n in zip(task.axes, file.facts.domain, file.facts.grid, strict=True):
        text = wrong.get(axis, f"spacing {(hi - lo) / n:g}")
        lines += [(f"axis {axis}", f"{n} points in ({lo:g}, {hi:g}), {text}")]
    lines += [("boundary", _boundary(file, task, rows))]
    for name, text in zip(file.facts.channels, _ranges(file, rows), strict=True):
        lines += [(f"channel {name}", text)]

    size = file.path.stat().st_size / 1e6
    script = "train_steady.py" if steady else "train_operator.py"
    train = (f"Train on it: python {script} --tasks {file.facts.name} "
             f"--data {shlex.quote(str(file.path))} --run runs/{file.facts.name}")
    if not steady and file.facts.frames < task.first_frame + 2:
        train = f"Too short to train on: that needs {task.first_frame + 2} frames."
    width = max(16, *(len(name) + 2 for name, _ in lines))
    return "\n".join([f"{file.path}: {file.facts.name}, {size:,.1f} MB"]
                     + [f"  {name:{width}s}{text}" for name, text in lines]
                     + [train])


def _count(n):
    return f"{n:,} trajector{'y' if n == 1 else 'ies'}"


def _splits(file, task):
    try:
        fields = Fields([file])
        sizes = ", ".join(f"{name} {len(fields.split(name)):,}" for name in SPLITS)
        return f"{sizes} "
    except UsageError as error:
        return str(error)


def _boundary(file, task, rows):
    """The boundary that the layout implies, and what the values say of it."""
    ratios = seam(file, rows)
    shown = " and ".join(f"{r:.2f}" for r in ratios)
    jumps = f"the jump across the seam is {shown} times the jumps inside"
    apart = max(ratios) > SEAM
    verdict = {("periodic", False): "as between neighbours", ("periodic", True): "NOT periodic",
               ("closed", True): "the ends do not touch",
               ("closed", False): "which alone could also be a period"}[
                   file.facts.boundary[0] or "closed", apart]
    return f"{' '.join(file.facts.boundary)}; {jumps} along {' and '.join(task.axes)}, {verdict}"


def _ranges(file, rows):
    low, high, total, square, count = np.inf, -np.inf, 0.0, 0.0, 0
    frames = range(file.facts.frames)[1 if file.facts.steady else 0:]  # (a, 0): no u
    size = 4 * len(file.facts.channels) * int(np.prod(file.facts.grid))
    for i, k in pieces(len(rows), len(frames), size):
        u = file.read(rows[i], frames[k])
        axes = (0, 1, *range(3, u.ndim))
        low, high = np.minimum(low, u.min(axes)), np.maximum(high, u.max(axes))
        total, square = total + u.sum(axes, np.float64), square + np.square(u).sum(axes, np.float64)
        count += u.size // u.shape[2]
    std = np.sqrt(np.maximum(square / count - (total / count) ** 2, 0))
    for stats in zip(low, high, total / count, std, strict=True):
        text = "{:.4g} to {:.4g}, mean {:.4g}, std {:.4g}".format(*stats)
        yield f"{text} (of {_count(len(rows))})"


def plot(path, png):
    """Draw a few trajectories to `png`, or beside the file; the panels of a row share colours."""
    png = Path(png or Path(path).with_suffix(".png"))
    if png.resolve() == Path(path).resolve() or png.suffix not in PICTURES:
        raise UsageError(f"--plot {png}: give a file of its own that ends in "
                         f"{', '.join(PICTURES)}.")
    from matplotlib.figure import Figure

    file = open_pdebench(path)
    task, dim = file.facts, len(file.facts.grid)
    overview = dim == 1 or task.layout == "steady"  # one panel shows a whole trajectory
    count = 4 if overview else max(1, 4 // len(file.facts.channels))
    rows = np.unique(np.linspace(0, file.samples - 1, count).astype(int))
    first = 0 if overview else min(task.first_frame, file.facts.frames - 1)
    frames = np.unique(np.linspace(first, file.facts.frames - 1, 5).astype(int))
    panels = {}  # label of a row -> {title: image}
    for row in rows:
        for c, name in enumerate(file.facts.channels):
            if overview:
                u = file.read([row])[0, :, c]
                panels.setdefault(name, {})[f"sample {row}"] = u.T if dim == 1 else u[-1]
                continue
            u = [file.read([row], range(k, k + 1))[0, 0, c] for k in frames]
            u = [v[..., v.shape[-1] // 2] if dim == 3 else v for v in u]  # the middle plane
            panels[f"{name}, sample {row}"] = {f"t = {t:.3g}": v for t, v in
                                               zip(file.times[frames], u, strict=True)}

    columns = len(next(iter(panels.values())))
    fig = Figure((2.1 * columns + 1, 2.1 * len(panels) + 0.6), layout="compressed")
    axes = fig.subplots(len(panels), columns, squeeze=False, sharex=True, sharey=True)
    for line, (label, images) in zip(axes, panels.items(), strict=True):
        low, high = min(v.min() for v in images.values()), max(v.max() for v in images.values())
        style = {"vmin": low, "vmax": high, "cmap": "viridis"}
        if low < -0.1 * high and high > -0.1 * low:  # both signs: zero is white
            style = {"vmin": -max(-low, high), "vmax": max(-low, high), "cmap": "RdBu_r"}
        if dim == 1:
            style |= {"extent": (*file.times[[0, -1]], *file.facts.domain[0]), "aspect": "auto"}
        for ax, (title, image) in zip(line, images.items(), strict=True):
            shown = ax.imshow(image, origin="lower", interpolation="nearest", **style)
            if line[0] is axes[0, 0]:
                ax.set_title(title, fontsize=10)
            if dim > 1:
                ax.set(xticks=[], yticks=[])
        line[0].set_ylabel("x" if dim == 1 else label)
        fig.colorbar(shown, ax=line.tolist(), aspect=18, label=label if dim == 1 else "")
    if dim == 1:
        fig.supxlabel("t", fontsize=10)
    fig.get_layout_engine().set(w_pad=0.08)
    params = "".join(f", {key} = {value:g}" for key, value in
                     zip(file.facts.params, file.params[0], strict=True))
    fig.suptitle(f"{file.facts.name}{params}", fontsize=12)
    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(png, dpi=130)
    except OSError as error:
        raise UsageError(f"--plot {png} cannot be written ({error}).") from None
    return png
