"""Pictures of roll-outs: truth, prediction and error over time."""

import numpy as np

CHOICE = ("best", "median", "worst")


def draw_rollouts(path, spec, channel, shown, tables):
    """Best, median and worst trajectory (rows), and how the error grows with the lead time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    truth, fields = (shown[key][:, :, channel].float().cpu().numpy() for key in ("truth", "fields"))
    draw = _draw_1d if len(spec.grid) == 1 else _draw_2d
    figure, curve = draw(plt, spec, truth, fields, shown["operator"].mean(1))
    _error_curve(curve, spec, tables)
    figure.suptitle(f"{spec.task}: {spec.channels[channel]}, rolled out from the first frame, "
                    "test split")
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


def draw_ensemble(path, spec, channel, truth, members, result):
    """One trajectory: the fan of its members in 1-D; mean, one member and spread in 2-D.

    truth (T, C, *grid), members (T, M, C, *grid); `result`: the scores by lead time.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    truth, members = (x.float().numpy() for x in (truth[:, channel], members[:, :, channel]))
    if truth.ndim == 4:  # three space axes: the middle slice
        truth, members = truth[:, truth.shape[1] // 2], members[:, :, members.shape[2] // 2]
    frames = sorted({max(1, round(part * (len(truth) - 1))) for part in (0.1, 0.4, 1.0)})
    draw = _fan_1d if truth.ndim == 2 else _ensemble_2d
    figure, curves = draw(plt, spec, truth, members, frames)
    for axis, key, title in zip(curves, ("crps", "spread_skill"), ("CRPS", "spread / skill"),
                                strict=True):
        for row, (label, scores) in enumerate(result["scores"].items()):
            if label != "operator" or key == "crps":
                axis.plot(result["leads"], scores[key], "o-", ms=3, color=f"C{row}", label=label)
        axis.set(title=title, xlabel="steps")
        axis.grid(alpha=0.25)
    curves[0].set_yscale("log")
    curves[0].legend(fontsize=8)
    curves[1].axhline(1.0, color="0.5", lw=1, ls="--")
    figure.suptitle(f"{spec.task}: {spec.channels[channel]} of the first test trajectory, "
                    f"{members.shape[1]} members")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _fan_1d(plt, spec, truth, members, frames):
    count = len(frames)
    figure = plt.figure(figsize=(3.6 * count + 4, 6.5), layout="constrained")
    axes = figure.subplots(2, count + 1, squeeze=False)
    x = np.linspace(*spec.domain[0], truth.shape[1], endpoint=False)
    for column, frame in enumerate(frames):
        mean = members[frame].mean(0)
        low, high = np.quantile(members[frame] - mean, (0.05, 0.95), axis=0)
        upper, lower = axes[:, column]
        upper.plot(x, members[frame].T, color="C0", lw=0.6, alpha=0.4)
        upper.plot(x, truth[frame], "k", lw=1.2)
        upper.set_title(f"t = {frame * spec.dt:.3g}")
        lower.fill_between(x, low, high, color="C0", alpha=0.3, label="members, 5 to 95 %")
        lower.plot(x, truth[frame] - mean, "k", lw=1.2, label="truth")
        lower.set_xlabel("x")
        for axis in (upper, lower):
            axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("truth (black), members")
    axes[1, 0].set_ylabel("less the ensemble mean")
    axes[1, 0].legend(fontsize=8)
    return figure, axes[:, -1]


def _ensemble_2d(plt, spec, truth, members, frames):
    count = len(frames)
    figure = plt.figure(figsize=(2.6 * count + 4.5, 11), layout="constrained")
    axes = figure.subplots(5, count + 1, squeeze=False, width_ratios=[1] * count + [1.4])
    for column, frame in enumerate(frames):
        mean, spread = members[frame].mean(0), members[frame].std(0, ddof=1)
        error = np.abs(truth[frame] - mean)
        bound, worst = (truth[frame].min(), truth[frame].max()), max(error.max(), 1e-12)
        for axis, values, (low, high), colours in (
                (axes[0, column], truth[frame], bound, "viridis"),
                (axes[1, column], mean, bound, "viridis"),
                (axes[2, column], members[frame, 0], bound, "viridis"),
                (axes[3, column], spread, (0, worst), "magma"),
                (axes[4, column], error, (0, worst), "magma")):
            image = axis.imshow(values, origin="lower", cmap=colours, vmin=low, vmax=high)
            figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0, column].set_title(f"t = {frame * spec.dt:.3g}")
    for row, label in enumerate(("truth", "ensemble mean", "one member", "spread",
                                 "|error of the mean|")):
        axes[row, 0].set_ylabel(label)
    for axis in axes[2:, -1]:
        axis.axis("off")
    return figure, axes[:2, -1]


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
