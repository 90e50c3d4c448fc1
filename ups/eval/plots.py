"""Pictures of roll-outs: truth, prediction and error over time."""

import numpy as np

CHOICE = ("best", "median", "worst")


def draw_rollouts(path, spec, shown, tables):
    """Best, median and worst trajectory (rows), and how the error grows with the lead time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    truth, fields = (shown[key][:, :, 0].float().cpu().numpy() for key in ("truth", "fields"))
    draw = _draw_1d if len(spec.grid) == 1 else _draw_2d
    figure, curve = draw(plt, spec, truth, fields, shown["operator"].mean(1))
    _error_curve(curve, spec, tables)
    figure.suptitle(f"{spec.task}: {spec.channels[0]}, rolled out from the first frame, test split")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_1d(plt, spec, truth, fields, scores):
    figure = plt.figure(figsize=(13, 7.5), layout="constrained")
    axes = figure.subplots(3, 4, width_ratios=(1, 1, 1, 1.15))
    end = spec.dt * (truth.shape[1] - 1)
    extent = (*spec.domain[0], 0.0, end)
    for row in range(3):
        bound = np.abs(truth[row]).max()
        error = fields[row] - truth[row]
        worst = max(np.abs(error).max(), 1e-12)
        panels = (("truth", truth[row], bound, "RdBu_r"),
                  ("prediction", fields[row], bound, "RdBu_r"),
                  ("error", error, worst, "PuOr_r"))
        for column, (title, values, limit, colours) in enumerate(panels):
            axis = axes[row, column]
            image = axis.imshow(values, origin="lower", aspect="auto", extent=extent,
                                cmap=colours, vmin=-limit, vmax=limit, interpolation="nearest")
            figure.colorbar(image, ax=axis, pad=0.02)
            if row == 0:
                axis.set_title(title)
            axis.set_xlabel("x" if row == 2 else "")
        axes[row, 0].set_ylabel(f"{CHOICE[row]} (nRMSE {scores[row]:.3g})\n\ntime")
    x = np.linspace(*spec.domain[0], truth.shape[2], endpoint=False)
    for row, axis in enumerate(axes[:2, 3]):  # best and median as curves
        for part, colour in zip((0.0, 0.25, 1.0), ("0.6", "C0", "C3"), strict=True):
            frame = round(part * (truth.shape[1] - 1))
            label = f"t = {frame * spec.dt:.3g}"
            axis.plot(x, truth[row, frame], color=colour, lw=1.2, label=label)
            axis.plot(x, fields[row, frame], color=colour, lw=2.2, ls=":")
        axis.set_xlabel("x")
        axis.grid(alpha=0.25)
    axes[0, 3].set_title("truth (line), prediction (dots)")
    axes[0, 3].legend(fontsize=8)
    return figure, axes[2, 3]


def _draw_2d(plt, spec, truth, fields, scores):
    truth, fields, score = truth[1], fields[1], scores[1]  # the median trajectory
    if truth.ndim == 4:  # three space axes: the middle slice
        truth, fields = truth[:, truth.shape[1] // 2], fields[:, fields.shape[1] // 2]
    frames = sorted({round(part * (len(truth) - 1)) for part in (0.0, 0.25, 0.5, 0.75, 1.0)})
    figure = plt.figure(figsize=(2.5 * len(frames) + 4.5, 7.5), layout="constrained")
    axes = figure.subplots(3, len(frames) + 1, width_ratios=[1] * len(frames) + [1.5])
    bound = (truth[frames].min(), truth[frames].max())
    worst = max(np.abs(fields - truth)[frames].max(), 1e-12)
    for column, frame in enumerate(frames):
        panels = ((truth[frame], bound, "viridis"), (fields[frame], bound, "viridis"),
                  (fields[frame] - truth[frame], (-worst, worst), "PuOr_r"))
        for row, (values, (low, high), colours) in enumerate(panels):
            axis = axes[row, column]
            image = axis.imshow(values, origin="lower", cmap=colours, vmin=low, vmax=high)
            axis.set_xticks([])
            axis.set_yticks([])
            if frame == frames[-1]:
                figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
        axes[0, column].set_title(f"t = {frame * spec.dt:.3g}")
    for row, label in enumerate(("truth", "prediction", "error")):
        axes[row, 0].set_ylabel(label)
    axes[0, 0].set_ylabel(f"truth (median, nRMSE {score:.3g})")
    axes[0, -1].axis("off")
    axes[1, -1].axis("off")
    return figure, axes[2, -1]


def draw_codec(path, spec, u, grid, patch):
    """Some fields (rows), what the two codecs make of them, and their errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    u, grid, patch = (t[:, 0].float().cpu().numpy() for t in (u, grid, patch))
    if u.ndim == 4:  # three space axes: the middle slice
        u, grid, patch = (t[:, t.shape[1] // 2] for t in (u, grid, patch))
    figure = plt.figure(figsize=(13, 2.8 * len(u)), layout="constrained")
    axes = figure.subplots(len(u), 2 if u.ndim == 2 else 4, squeeze=False)
    for row, (true, ours, plain) in enumerate(zip(u, grid, patch, strict=True)):
        if u.ndim == 2:
            x = np.linspace(*spec.domain[0], len(true), endpoint=False)
            for values, style, label in ((true, "k-", "field"), (plain, "C1--", "patch codec"),
                                         (ours, "C0:", "grid codec")):
                axes[row, 0].plot(x, values, style, label=label)
            axes[row, 1].plot(x, plain - true, "C1--", x, ours - true, "C0-")
            for axis in axes[row]:
                axis.grid(alpha=0.25)
            continue
        worst = max(np.abs(plain - true).max(), 1e-12)
        panels = ((true, None, "viridis"), (ours, None, "viridis"),
                  (ours - true, worst, "PuOr_r"), (plain - true, worst, "PuOr_r"))
        for axis, (values, limit, colours) in zip(axes[row], panels, strict=True):
            image = axis.imshow(values, origin="lower", cmap=colours,
                                vmin=true.min() if limit is None else -limit,
                                vmax=true.max() if limit is None else limit)
            figure.colorbar(image, ax=axis)
            axis.set_xticks([])
            axis.set_yticks([])
    titles = ("field and its reconstructions", "error")
    if u.ndim == 3:
        titles = ("field", "grid codec", "error of the grid codec", "error of the patch codec")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    if u.ndim == 2:
        axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _error_curve(axis, spec, tables):
    steps = np.arange(1, tables["operator"].shape[1] + 1)
    for name, colour in (("persistence", "0.5"), ("operator", "C0"), ("codec", "C2")):
        values = np.maximum(tables[name].numpy(), 1e-12)
        axis.plot(steps, values.mean(0), color=colour, marker="o" if len(steps) == 1 else None,
                  label="codec floor" if name == "codec" else name)
        if name == "operator":
            low, high = np.quantile(values, (0.1, 0.9), axis=0)
            axis.fill_between(steps, low, high, color=colour, alpha=0.2)
    axis.set(yscale="log", xlabel="steps", ylabel="nRMSE", title="error (band: 10 to 90 %)")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
