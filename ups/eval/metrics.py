"""Errors in physical units, and the definitions that are printed and stored beside them.

Fields are p (predicted) and y (true), (B, T, C, *grid); an error is a float64 table (B, T, C).
Ensembles are members (B, M, C, *grid) against the truth (B, C, *grid) of one lead. Means over
channels, leads and trajectories are the caller's.
"""

import functools

import torch

from ups.relative_error import mean_relative_error, relative_error

LOW, HIGH = 4, 12  # edges of the wavenumber bands of fRMSE
WELL_EPS = 1e-7    # in VRMSE, as The Well has it
CORRELATED = 0.8   # a forecast below this correlation with the truth is lost

NRMSE = ("nRMSE = |p - y|_2 / |y|_2 over space, for each trajectory, channel and predicted frame, "
         "then the mean over all of them (a channel that is zero everywhere, or given, is left "
         "out); physical units; given frames are not counted")
_MEAN = "mean over trajectories, channels and predicted frames"
DEFINITIONS = {
    "nrmse": NRMSE,
    "sample_nrmse": "nRMSE of the first member of an ensemble",
    "rmse": f"RMSE = root of the mean of (p - y)^2 over space, {_MEAN} (PDEBench's order)",
    "vrmse": ("VRMSE (The Well) = root of [mean of (p - y)^2 / (variance of y + 1e-7)], both over "
              f"space, {_MEAN}"),
    "max_error": "max error = largest |p - y| over space, channels, frames and trajectories",
    "relative_l2": ("relative L2 (DPOT) = |p - y|_2 / |y|_2 over space and all predicted frames of "
                    "a trajectory, mean over channels and trajectories"),
    "crmse": (f"cRMSE = |mean of p - mean of y| over space, {_MEAN} (PDEBench takes the root of "
              "the mean square over a batch instead)"),
    "brmse": ("bRMSE = root of the mean of (p - y)^2 over the first and last cells of every axis "
              f"(a corner counts once for each axis), {_MEAN}"),
    "frmse": ("fRMSE = root of the sum of |FFT(p - y)|^2 over a wavenumber shell floor|k|, divided "
              "by the number of grid points (1-D: k >= 0 as in PDEBench; else all modes, corners "
              f"included, where PDEBench takes a quarter); mean over the shells low [0, {LOW}), "
              f"mid [{LOW}, {HIGH}) or high [{HIGH}, ..) that the grid has; {_MEAN}"),
    "correlation_time": ("correlation time = time of the last frame before the spatial correlation "
                         f"of p and y first falls below {CORRELATED} (a uniform truth counts as "
                         "correlated), mean over channels and trajectories"),
    "drift": ("conservation drift = |mean of p - mean of the first frame| / rms of the first "
              "frame, over space, for the channels that the equation conserves, mean over "
              "trajectories and frames"),
    "spectrum": ("E(k) = half the sum of |FFT(u) / points|^2 over all modes with floor|k| = k, so "
                 "that the sum over k is half the mean square of the field"),
    "spectrum_error": ("high-band spectrum error = sum of |E_p(k) - E_y(k)| / sum of E_y(k), over "
                       f"trajectories, channels and k >= min({HIGH}, points per axis / 4); E_p of "
                       "an ensemble is the mean of its members' energies"),
    "crps": ("fair CRPS = mean over members of |x_i - y| - sum over pairs i, j of |x_i - x_j| / "
             "(2 M (M - 1)), mean over space, channels and trajectories; of one member, the "
             "absolute error"),
    "energy_score": ("fair energy score (Gneiting and Raftery, 2007) = the CRPS of whole fields: "
                     "|.| is the root mean square over space; mean over channels and trajectories"),
    "crps_block": "CRPS of block means = fair CRPS of means over blocks of 4 points an axis",
    "spread_skill": ("spread / skill = root of [(M + 1) / M * mean of the members' unbiased "
                     "variance / mean squared error of the ensemble mean], means over space and "
                     "trajectories before the ratio; 1 where members and truth are exchangeable"),
    "rank": ("rank histogram = share of grid points at which the truth is above exactly r of the M "
             "members, ties shared; flat where members and truth are exchangeable"),
    "coverage_50, coverage_90": (
        "coverage = share of grid points at which the truth lies in the central 50 or 90 % of the "
        "members; ranks that are partly inside count in part, so 0.5 and 0.9 are right for any M"),
    "nrmse_ratio, crps_ratio": ("nRMSE and CRPS as shares of the operator's: means over "
                                "trajectories before the ratio, and in each resampling"),
    "interval": "95 % bootstrap interval: percentiles of 1000 resamplings of whole trajectories",
}


# one forecast
def nrmse(p, y):
    """Relative errors (B, T): the mean over channels."""
    return mean_relative_error(p.double(), y.double(), space=3)


def channel_nrmse(p, y):
    """Relative errors (B, T, C); NaN where a channel of y is zero, infinite where p or y is NaN."""
    return relative_error(p.double(), y.double(), space=3)


def drift(p, u0, channels):
    """How far conserved means have moved (B, T) in p (B, T, C, *grid) since u0 (B, C, *grid)."""
    p, u0 = p[:, :, channels].flatten(3), u0[:, None, channels].flatten(3)
    moved = (p.mean(3) - u0.mean(3)).abs()
    return (moved / u0.square().mean(3).sqrt().clamp(min=1e-6)).mean(2)


def brmse(p, y):
    e = p - y
    faces = [e.narrow(axis, side, 1).flatten(3)
             for axis in range(3, e.ndim) for side in (0, e.shape[axis] - 1)]
    return torch.cat(faces, 3).square().mean(3).sqrt()


def frmse(p, y):
    """Errors by wavenumber (B, T, C, 3): low, mid and high band."""
    shells = shell_power(p - y, one_sided=p.ndim == 4).sqrt()
    bands = (shells[..., :LOW], shells[..., LOW:HIGH], shells[..., HIGH:])
    return torch.stack([band.mean(3) for band in bands], 3)  # the mean of nothing is NaN


def correlation(p, y):
    """Pearson correlation over space (B, T, C); 1 where the truth is uniform."""
    p, y = p.flatten(3), y.flatten(3)
    a, b = p - p.mean(3, keepdim=True), y - y.mean(3, keepdim=True)
    size = a.norm(dim=3) * b.norm(dim=3)
    value = torch.where(size > 0, (a * b).sum(3) / size, 0.0)
    return torch.where(b.norm(dim=3) > 1e-6 * y.norm(dim=3), value, 1.0)


FIELD = {  # (B, T, C) of float64 fields
    "rmse": lambda p, y: (p - y).flatten(3).square().mean(3).sqrt(),
    "vrmse": lambda p, y: ((p - y).flatten(3).square().mean(3)
                           / (y.flatten(3).var(3, correction=0) + WELL_EPS)).sqrt(),
    "max_error": lambda p, y: (p - y).flatten(3).abs().amax(3),
    "crmse": lambda p, y: (p - y).flatten(3).mean(3).abs(),
    "size": lambda p, y: y.flatten(3).square().mean(3).sqrt(),
    "brmse": brmse, "frmse": frmse, "correlation": correlation}


def relative_l2(error, size):
    """Relative L2 (B, C) from tables (B, T, C) of the RMSE and of the root mean square of y."""
    size = size.square().sum(1)
    return torch.where(size > 0, (error.square().sum(1) / size).sqrt(), torch.nan)


def correlation_time(table, dt):
    """Time (B, C) for which a table (B, T, C) of correlations stays above the limit."""
    return dt * (table >= CORRELATED).long().cumprod(1).sum(1).double()


# spectra
def shell_power(u, one_sided=False):
    """Power (.., K) of fields (B, T, C, *grid) by shells floor|k|: sums of |FFT / points|^2.

    All modes count, so that the sum over shells is the mean square (`one_sided`: 1-D, k >= 0).
    """
    grid = u.shape[3:]
    shell, weight = _shells(tuple(grid), u.device)
    u = torch.fft.rfftn(u.double(), dim=tuple(range(3, u.ndim)), norm="forward")
    power = u.abs().square().flatten(3)
    power = power if one_sided else power * weight
    out = power.new_zeros(*power.shape[:3], int(shell.max()) + 1)
    return out.scatter_add_(3, shell.expand_as(power), power)


@functools.lru_cache(8)
def _shells(grid, device):
    """Shell of every mode of rfftn, and how often it stands in the full spectrum."""
    waves = [torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) for n in grid[:-1]]
    waves.append(torch.arange(grid[-1] // 2 + 1, dtype=torch.float64))
    k = torch.stack(torch.meshgrid(*waves, indexing="ij"))
    twice = (k[-1] > 0) & (2 * k[-1] != grid[-1])
    return k.norm(dim=0).floor().long().flatten().to(device), (1.0 + twice).flatten().to(device)


def spectrum(u):
    """Energy by wavenumber (B, T, C, K), whose sum is half the mean square of the field."""
    return shell_power(u) / 2


def spectrum_error(e_pred, e_true, grid):
    """Missing or surplus energy in the high band, and the true energy there: (B, T, C) each.

    The error is the ratio of their means over trajectories: no trajectory that is smooth, and has
    next to nothing there, decides it.
    """
    first = min(HIGH, min(n for n in grid if n > 1) // 4)  # on coarse grids the upper half
    return (e_pred - e_true)[..., first:].abs().sum(-1), e_true[..., first:].sum(-1)


# ensembles: members (B, M, C, *grid), truth (B, C, *grid)
def crps(members, y):
    """Fair CRPS (B, C), mean over space (Ferro, 2014), in the sorted form: O(M log M)."""
    x, y = members.double().flatten(3), y.double().flatten(2)  # (B, M, C, points)
    count = x.shape[1]
    error = (x - y[:, None]).abs().mean((1, 3))
    return error - pairs(x).mean(2) / max(1, count * (count - 1))


def pairs(x):
    """The sum of |x_i - x_j| over pairs i < j of members x (B, M, ..): (B, ..)."""
    place = torch.arange(1 - x.shape[1], x.shape[1], 2, dtype=x.dtype, device=x.device)
    return torch.tensordot(x.sort(1).values, place, ([1], [0]))  # of each: pairs below - above


def energy_score(members, y):
    """Fair energy score (B, C): the CRPS with the root mean square over space for |.|."""
    x, y = members.double().flatten(3).transpose(1, 2), y.double().flatten(2)  # (B, C, M, points)
    count, points = x.shape[2:]
    twice = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").sum((2, 3))
    error = (x - y[:, :, None]).norm(dim=3).mean(2) - twice / (2 * count * max(1, count - 1))
    return error / points**0.5


def spread_skill(members, y):
    """Squares of spread and skill, (B, C) each: the members' unbiased variance times (M + 1) / M,
    and the squared error of their mean. The ratio is that of their means over trajectories.
    """
    x, y = members.double().flatten(3), y.double().flatten(2)
    return (1 + 1 / x.shape[1]) * x.var(1).mean(2), (x.mean(1) - y).square().mean(2)


def rank_histogram(members, y):
    """Share of points (B, C, M + 1) at which the truth has rank 0 .. M among the members."""
    x, y = members.flatten(3), y.flatten(2)[:, None]
    below, upto = (x < y).sum(1), (x <= y).sum(1)  # (B, C, points)
    share = 1.0 / (upto - below + 1).double()  # ties: an equal part for every possible rank
    edges = share.new_zeros(*below.shape[:2], members.shape[1] + 2)
    edges.scatter_add_(2, below, share).scatter_add_(2, upto + 1, -share)
    return edges.cumsum(2)[..., :-1] / below.shape[2]


def coverage(ranks, share):
    """How often the truth lies in the central `share` of the members, by a histogram (.., M + 1).

    A rank that is partly inside counts in part, so that members from which the truth cannot be told
    cover `share` exactly, however few they are.
    """
    edge = torch.linspace(0, 1, ranks.shape[-1] + 1, dtype=ranks.dtype, device=ranks.device)
    inside = edge.clamp((1 - share) / 2, (1 + share) / 2).diff() * ranks.shape[-1]
    return ranks @ inside


def block_means(u, size):
    """Means of fields (B, M, C, *grid) over blocks of `size` points an axis; what is left over at
    the end of an axis is left out. An axis of fewer points is one block."""
    for axis in range(3, u.ndim):
        width = min(size, u.shape[axis])
        u = u.unfold(axis, width, width).mean(-1)
    return u


# uncertainty of a mean
def resamplings(count, draws=1000, seed=0):
    """Weights (draws, count) of bootstrap means over trajectories: rows sum to one."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(count, (draws, count), generator=generator)
    ones = torch.full(chosen.shape, 1 / count, dtype=torch.float64)
    return torch.zeros(draws, count, dtype=torch.float64).scatter_add_(1, chosen, ones)


def interval(means):
    """Bounds (2, ..) of the 95 % bootstrap interval, from resampled means (draws, ..)."""
    return means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
