"""A picture of the steady prior: what is given, what is true, what is drawn, and how far off."""

import numpy as np

CHOICE = ("best", "median", "worst")


def draw_steady(path, spec, truth, members, scores):
    """Best, median and worst sample (rows); truth (3, 2, *grid) = a, u; members (3, M, *grid)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    a, u = truth.float().numpy().swapaxes(0, 1)
    members = members.float().numpy()
    mean, spread = members.mean(1), members.std(1, ddof=1)
    error, titles = mean - u, ("coefficient a", "solution u", "mean", "one member", "spread",
                               "|error of the mean|")
    figure = plt.figure(figsize=(15, 7.4), layout="constrained")
    axes = figure.subplots(3, len(titles))
    for row in range(3):
        high = u[row].max()
        most = max(np.abs(error[row]).max(), spread[row].max(), 1e-12)
        panels = ((a[row], 0.0, a.max(), "Greys"), (u[row], 0.0, high, "viridis"),
                  (mean[row], 0.0, high, "viridis"), (members[row, 0], 0.0, high, "viridis"),
                  (spread[row], 0.0, most, "magma"), (np.abs(error[row]), 0.0, most, "magma"))
        for axis, title, (values, low, top, colours) in zip(axes[row], titles, panels, strict=True):
            image = axis.imshow(values, origin="lower", cmap=colours, vmin=low, vmax=top)
            axis.set(xticks=[], yticks=[])
            if row == 0:
                axis.set_title(title)
            if title in ("coefficient a", "one member", "|error of the mean|"):
                figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
        axes[row, 0].set_ylabel(f"{CHOICE[row]} (nRMSE {scores[row]:.2g})")
    figure.suptitle(f"{spec.task}: {members.shape[1]} members given the coefficient, test split; "
                    "solution, mean and member share a scale, spread and error another")
    figure.savefig(path, dpi=100)
    plt.close(figure)
