"""Pictures that the stages leave: truth, prediction and error."""

import numpy as np

CHOICE = ("best", "median", "worst")


def picture(path, draw, *args):
    """Draw into a file, by `draw(figure, *args)`, where that can be done."""
    try:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        draw(figure, *args)
        figure.savefig(path, dpi=110)
        print(f"picture: {path}")
    except (ImportError, OSError) as error:
        print(f"no picture: {error}")


def _images(axes, panels, bars=True, **options):
    """A row or column of fields: `panels` are (values, low, high, colours)."""
    for axis, (values, low, high, colours) in zip(axes, panels, strict=True):
        image = axis.imshow(values, origin="lower", cmap=colours, vmin=low, vmax=high, **options)
        if bars:
            axis.figure.colorbar(image, ax=axis, pad=0.03)
        if not options:
            axis.set(xticks=[], yticks=[])


def draw_rollouts(figure, spec, fields, tables):
    """Best, median and worst trajectory (rows), and how the error grows with the lead time."""
    tables = {name: table["nrmse"].nanmean(2) for name, table in tables.items()}  # (n, T - 1)
    scores = tables["operator"].mean(1).sort().values
    draw = _draw_1d if len(spec.grid) == 1 else _draw_2d
    axis = draw(figure, spec, fields["truth"].numpy(), fields["operator"].numpy(),
                scores[[0, len(scores) // 2, -1]])
    _error_curve(axis, tables)
    figure.suptitle(f"{spec.name}: {spec.channels[0]}, rolled out from the first frame "
                    "(t = 0), test split")


def _draw_1d(figure, spec, truth, fields, scores):
    figure.set_size_inches(13, 7.5)
    axes = figure.subplots(3, 4, width_ratios=(1, 1, 1, 1.15))
    extent = (*spec.domain[0], 0.0, spec.dt * (truth.shape[1] - 1))
    for row in range(3):
        bound, error = np.abs(truth[row]).max(), fields[row] - truth[row]
        worst = max(np.abs(error).max(), 1e-12)
        _images(axes[row, :3], ((truth[row], -bound, bound, "RdBu_r"),
                                (fields[row], -bound, bound, "RdBu_r"),
                                (error, -worst, worst, "PuOr_r")),
                aspect="auto", extent=extent, interpolation="nearest")
        axes[row, 0].set_ylabel(f"{CHOICE[row]} (nRMSE {scores[row]:.3g})\n\ntime")
    for axis, title in zip(axes[0], ("truth", "prediction", "error",
                                     "truth (line), prediction (dots)"), strict=True):
        axis.set_title(title)
    x = np.linspace(*spec.domain[0], truth.shape[2], endpoint=False)
    for row, axis in enumerate(axes[:2, 3]):  # best and median as curves
        for part, colour in zip((0.0, 0.25, 1.0), ("0.6", "C0", "C3"), strict=True):
            frame = round(part * (truth.shape[1] - 1))
            label = f"t = {frame * spec.dt:.3g}"
            axis.plot(x, truth[row, frame], color=colour, lw=1.2, label=label)
            axis.plot(x, fields[row, frame], color=colour, lw=2.2, ls=":")
        axis.grid(alpha=0.25)
    for axis in (*axes[2, :3], *axes[:2, 3]):
        axis.set_xlabel("x")
    axes[0, 3].legend(fontsize=8)
    return axes[2, 3]


def _draw_2d(figure, spec, truth, fields, scores):
    truth, fields = _planes(truth[1], fields[1])  # the median trajectory
    frames = sorted({round(part * (len(truth) - 1)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)})
    figure.set_size_inches(2.5 * len(frames) + 4.5, 7.5)
    axes = figure.subplots(3, len(frames) + 1, width_ratios=[1] * len(frames) + [1.5])
    bound = (truth[frames].min(), truth[frames].max())
    worst = max(np.abs(fields - truth)[frames].max(), 1e-12)
    for column, frame in enumerate(frames):
        _images(axes[:, column], ((truth[frame], *bound, "viridis"),
                                  (fields[frame], *bound, "viridis"),
                                  (fields[frame] - truth[frame], -worst, worst, "PuOr_r")),
                bars=frame == frames[-1])
        axes[0, column].set_title(f"t = {frame * spec.dt:.3g}")
    labels = (f"truth (median, nRMSE {scores[1]:.3g})", "prediction", "error")
    for row, label in enumerate(labels):
        axes[row, 0].set_ylabel(label)
    for axis in axes[:, -1]:
        axis.remove()
    return figure.add_subplot(axes[0, -1].get_gridspec()[:, -1])


def _planes(*fields):
    """The middle slices of fields (n, *grid) with three space axes."""
    return [u[:, u.shape[1] // 2] if u.ndim == 4 else u for u in fields]


def draw_ensemble(figure, spec, truth, members):
    """One trajectory (T, *grid) and members (T, M, *grid): truth, four of them and their spread, in
    1-D over space and time, else at three times; below, the fan of a point over time."""
    truth, members = truth.float().numpy(), members.float().numpy()
    while truth.ndim > 3:  # three space axes: the middle slice
        truth, members = truth[:, truth.shape[1] // 2], members[:, :, members.shape[2] // 2]
    frames = [slice(None)] if truth.ndim == 2 else sorted(
        {max(1, round(part * (len(truth) - 1))) for part in (0.1, 0.4, 1.0)})
    shown, spread = min(4, members.shape[1]), members.std(1, ddof=1)
    figure.set_size_inches(14.5, 2.5 * len(frames) + 3.5)
    above, below = figure.subfigures(2, height_ratios=(2.5 * len(frames), 3.3))
    axes = above.subplots(len(frames), shown + 2, squeeze=False)
    for row, frame in enumerate(frames):
        u = truth[frame]
        panels = [(u, u.min(), u.max(), "viridis")] + [
            (members[frame, m] if truth.ndim == 3 else members[:, m], u.min(), u.max(), "viridis")
            for m in range(shown)] + [(spread[frame], 0, spread[frame].max() or 1.0, "magma")]
        _images(axes[row, :-1], panels[:-1], bars=False, aspect="auto")
        _images(axes[row, -1:], panels[-1:], aspect="auto")
        label = "time, upwards" if truth.ndim == 2 else f"t = {frame * spec.dt:.3g}"
        axes[row, 0].set_ylabel(label)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ["truth", *(f"member {m + 1}" for m in range(shown)), "spread"],
                           strict=True):
        axis.set_title(title)
    middle = tuple(n // 2 for n in truth.shape[1:])
    time, fan = spec.dt * np.arange(len(truth)), members[(slice(None), slice(None), *middle)]
    axis = below.subplots()
    for share, shade in ((90, 0.2), (50, 0.35)):
        low, high = np.percentile(fan, (50 - share / 2, 50 + share / 2), axis=1)
        axis.fill_between(time, low, high, color="C0", alpha=shade, lw=0, label=f"{share} %")
    axis.plot(time, fan[:, :shown], color="C0", lw=0.7)
    axis.plot(time, truth[(slice(None), *middle)], "k", lw=1.4, label="truth")
    axis.set(xlabel="time", ylabel=spec.channels[0], title="the point in the middle: truth, four "
             f"members, and the bands of {members.shape[1]}")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.suptitle(f"{spec.name}: {spec.channels[0]} of a test trajectory")


def draw_codec(figure, spec, u, grid, patch):
    """Some fields (rows), what the two codecs make of them, and their errors."""
    u, grid, patch = _planes(*(t[:, 0].float().cpu().numpy() for t in (u, grid, patch)))
    titles = ("field and its reconstructions", "error")
    if u.ndim == 3:
        titles = ("field", "grid codec", "error of the grid codec", "error of the patch codec")
    figure.set_size_inches(13, 2.8 * len(u))
    axes = figure.subplots(len(u), len(titles), squeeze=False)
    for row, (true, ours, plain) in enumerate(zip(u, grid, patch, strict=True)):
        if u.ndim == 2:
            x = np.linspace(*spec.domain[0], len(true), endpoint=False)
            for values, style, label in ((true, "k-", "field"), (plain, "C1--", "patch codec"),
                                         (ours, "C0:", "grid codec")):
                axes[row, 0].plot(x, values, style, label=label)
            axes[row, 1].plot(x, plain - true, "C1--", x, ours - true, "C0-")
            axes[0, 0].legend(fontsize=8)
            continue
        bound, worst = (true.min(), true.max()), max(np.abs(plain - true).max(), 1e-12)
        _images(axes[row], ((true, *bound, "viridis"), (ours, *bound, "viridis"),
                            (ours - true, -worst, worst, "PuOr_r"),
                            (plain - true, -worst, worst, "PuOr_r")))
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)


def draw_steady(figure, spec, inputs, truth, members, scores):
    """Best, median and worst sample (rows), the first channel; inputs (3, E, *grid) or None,
    truth (3, C, *grid), members (3, M, C, *grid)."""
    def plane(t):  # the middle slice of three axes, a stripe of one
        t = t.float().numpy()
        while t.ndim > 2:
            t = t[len(t) // 2]
        return np.atleast_2d(t)

    members = members[:, :, 0]
    mean, spread = members.mean(1), members.std(1)
    figure.set_size_inches(15 if inputs is not None else 12.5, 7.4)
    axes = figure.subplots(3, 6 if inputs is not None else 5)
    for row in range(3):
        u, p, one, deviation = map(plane, (truth[row, 0], mean[row], members[row, 0], spread[row]))
        error, scale = np.abs(p - u), (min(u.min(), 0.0), max(u.max(), 0.0), "viridis")
        most = max(error.max(), deviation.max(), 1e-12)
        panels = [(u, *scale), (p, *scale), (one, *scale), (deviation, 0.0, most, "magma"),
                  (error, 0.0, most, "magma")]
        if inputs is not None:
            v = plane(inputs[row, 0])
            panels.insert(0, (v, v.min(), max(v.max(), v.min() + 1e-12), "Greys"))
        _images(axes[row], panels)
        axes[row, 0].set_ylabel(f"{CHOICE[row]} (nRMSE {scores[row]:.2g})")
    titles = [f"solution {spec.channels[0]}", "mean", "one member", "spread", "|error of the mean|"]
    titles = [f"input {spec.inputs[0]}"] * (inputs is not None) + titles
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    figure.suptitle(f"{spec.name}: {members.shape[1]} members, test split; solution, mean and "
                    "member share a scale, spread and error another")


def _error_curve(axis, tables):
    steps = np.arange(1, tables["operator"].shape[1] + 1)
    bottom, floor = tables["operator"].mean(0).min().item() / 30, tables["codec"].mean().item()
    names = {"codec": "codec floor" if floor > bottom else f"codec floor: {floor:.0e}"}
    for name, colour in (("persistence", "0.5"), ("operator", "C0"), ("codec", "C2")):
        values = np.maximum(tables[name].numpy(), 1e-12)
        axis.plot(steps, values.mean(0), color=colour, marker="o" if len(steps) == 1 else None,
                  label=names.get(name, name))
        if name == "operator":
            low, high = np.quantile(values, (0.1, 0.9), axis=0)
            axis.fill_between(steps, low, high, color=colour, alpha=0.2)
    axis.set(yscale="log", xlabel="steps", ylabel="nRMSE", title="error (band: 10 to 90 %)")
    if 0 < bottom < np.inf and floor <= bottom:  # a lossless codec would squeeze the others
        axis.set_ylim(bottom=bottom)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)


def draw_data(figure, fields):
    """Each channel in a row: four trajectories over (x, t), or five frames of the first."""
    facts, times = fields.facts, fields.files[0].times[list(fields.frames)]
    options = {}
    if len(facts.grid) == 1:
        panels = {f"trajectory {row}": fields.read([row]).numpy()[0].swapaxes(0, 1)
                  for row in range(min(4, len(fields)))}
        options = {"aspect": "auto", "extent": (*facts.domain[0], times[0], times[-1])}
    else:
        step = slice(int(facts.steady), None, max(1, (facts.frames - 1) // 4))
        u = fields.read([0], step).numpy()[0]
        u = u[:, :, u.shape[2] // 2] if len(facts.grid) == 3 else u  # the middle plane
        panels = {f"t = {t:.3g}": frame for t, frame in zip(times[step], u, strict=True)}
    values = np.stack([*panels.values()], 1)  # (C, panels, *plane)
    figure.set_size_inches(2.2 * len(panels) + 1, 2.2 * len(values) + 0.4)
    grid = figure.subplots(*values.shape[:2], squeeze=False)
    for axes, name, row in zip(grid, facts.channels, values, strict=True):
        _images(axes, [(u, row.min(), row.max(), "viridis") for u in row], False, **options)
        figure.colorbar(axes[0].images[0], ax=axes.tolist(), label=name)
    for axis, title in zip(grid[0], panels, strict=True):
        axis.set_title(title)
    grid[-1, 0].set(xlabel=facts.axes[-1], ylabel="time" if options else facts.axes[-2])
