"""Measure the forecasts of a task, streaming: some trajectories, one lead at a time.

Errors of an ensemble are those of its mean. Every table has a row for each trajectory, so that the
numbers do not depend on the number of processes, and intervals can be drawn from it.
"""

import torch

from ups.eval import metrics
from ups.eval.forecasts import PROBES, YARDSTICKS, start
from ups.eval.rollout import CHUNK_BYTES, by_trajectory, trajectory_bytes
from ups.train.ranks import now

CHUNK = 16  # trajectories at a time, at most
FIELD = {"nrmse": metrics.channel_nrmse, "rmse": metrics.rmse, "vrmse": metrics.vrmse,
         "max_error": metrics.max_error, "crmse": metrics.crmse, "brmse": metrics.brmse,
         "mae": metrics.mae, "correlation": metrics.correlation}
MEANS = ("nrmse", "rmse", "vrmse", "mae", "crps", "sample_nrmse", "crmse", "brmse", "frmse_low",
         "frmse_mid", "frmse_high", "drift")  # whose summary is a plain mean


@torch.no_grad()
def measure_all(accelerator, task, forecasts, test, members):
    """{forecast: {metric: (n, T - 1, ..)}} and {forecast: milliseconds of a step of a trajectory}.

    `spectrum` has the leads of `spectrum_leads` alone, and is all that "truth" has. Chunks are the
    same on any number of processes, and so is every bit of a row on a CPU.
    """
    spec, seconds, results = task.fields.facts, {name: [] for name in forecasts}, {}
    size = CHUNK_BYTES // int(trajectory_bytes(spec) * (1 + 4 * members / spec.frames))

    def tables(chosen):
        return tables_of(start(task, chosen, test, accelerator.device), task, forecasts, seconds)

    whole = by_trajectory(accelerator, tables, test, min(size, CHUNK), False, task.name)
    for (name, metric), table in whole.items():
        results.setdefault(name, {})[metric] = table
    return results, {name: 1e3 * float(torch.tensor(t).median()) for name, t in seconds.items()}


def tables_of(s, task, forecasts, seconds):
    """{(forecast, metric): (B, T - 1, ..)} of the trajectories of `s`."""
    kept, rows = spectrum_leads(s.steps + 1), {}
    u, conserved = s.u, task.conserved
    energies = [metrics.spectrum(u[:, k:k + 1]) for k in range(1, s.steps + 1)]
    rows["truth", "spectrum"] = [energies[k - 1][:, 0].sum(1) for k in kept]
    for name, forecast in forecasts.items():
        for k, p in enumerate(timed(forecast(s), seconds[name], s.u), start=1):
            scores = score(p, u[:, k], energies[k - 1], u[:, 0], conserved,
                           name in PROBES)
            for metric, value in scores.items():
                if metric != "spectrum" or k in kept:
                    rows.setdefault((name, metric), []).append(value)
    return {key: torch.stack(values, 1) for key, values in rows.items()}


def timed(generator, seconds, u):
    """Pass a generator on, and note the seconds that it takes for each lead and trajectory of u."""
    begin = now()
    for item in generator:
        seconds.append((now() - begin) / len(u))
        yield item
        begin = now()


def score(p, y, energy, u0, conserved, brief=False):
    """Metrics (B, C, ..) of members p (B, M, C, *grid) against y (B, C, *grid) of one lead."""
    mean, y1 = p.mean(1, keepdim=True), y[:, None]
    if brief:
        return {"nrmse": metrics.channel_nrmse(mean, y1)[:, 0]}
    out = {name: metric(mean, y1)[:, 0] for name, metric in FIELD.items()}
    bands = metrics.frmse(mean, y1)[:, 0].unbind(-1)
    out |= dict(zip(("frmse_low", "frmse_mid", "frmse_high"), bands, strict=True))
    out["size"] = metrics.rmse(torch.zeros_like(y1), y1)[:, 0]
    out["crps"] = metrics.crps(p, y)
    if conserved:
        out["drift"] = metrics.drift(mean.double(), u0.double(), conserved)[:, 0]
    own = metrics.spectrum(p).mean(1, keepdim=True)
    missing, there = metrics.spectrum_error(own, energy, y.shape[2:])
    out |= {"spectrum": own[:, 0].sum(1), "missing": missing[:, 0], "there": there[:, 0]}
    if p.shape[1] > 1:
        out["variance"], out["square_error"] = metrics.spread_skill(p, y)
        out["sample_nrmse"] = metrics.channel_nrmse(p[:, :1], y1)[:, 0]
        out["rank"] = metrics.rank_histogram(p, y).mean(1)
    return out


def spectrum_leads(frames):
    """The first, the middle and the last lead."""
    return sorted({1, frames // 2, frames - 1})


def summarise(tables, operator, task, members, seed=0):
    """Means, by lead and over all leads, with bootstrap intervals: plain values for JSON.

    `operator`: the tables of the operator, to which ratios are formed.
    """
    count = len(tables["nrmse"])
    weights = torch.cat([torch.full((1, count), 1 / count, dtype=torch.float64),
                         metrics.resamplings(count, seed=seed)])
    spec, scores = task.fields.facts, {}
    channels = [spec.channels[c] for c in range(len(spec.channels))]

    def add(name, combine, *parts):
        """Parts (n, T) or (n, T, C) -> means over channels and resampled trajectories."""
        over = [weighted(weights, part.nanmean(2) if part.ndim > 2 else part) for part in parts]
        scores[name] = record(combine(*(part.nanmean(1) for part in over)), combine(*over))
        if parts[0].ndim > 2 and len(channels) > 1:
            each = [weighted(weights[:1], part)[0] for part in parts]  # (T, C)
            whole, by_lead = combine(*(part.nanmean(0) for part in each)), combine(*each)
            scores[name]["by_channel"] = {
                channel: {"all": whole[c].item(), "by_lead": by_lead[:, c].tolist()}
                for c, channel in enumerate(channels)}

    for name in MEANS:
        if name in tables:
            add(name, lambda mean: mean, tables[name])
    for name in ("nrmse", "crps"):
        if name in tables and tables is not operator:
            add(f"{name}_ratio", torch.divide, tables[name], operator[name])
    if "size" in tables:
        add("spectrum_error", torch.divide, tables["missing"], tables["there"])
        worst = tables["max_error"]
        scores["max_error"] = {"all": worst.max().item(), "by_lead": worst.amax((0, 2)).tolist()}
        length = metrics.correlation_time(tables["correlation"], spec.dt)
        relative = metrics.relative_l2(tables["rmse"], tables["size"])
        for name, table in (("correlation_time", length), ("relative_l2", relative)):
            scores[name] = record(weighted(weights, table.nanmean(1)))
    if "variance" in tables:
        add("spread_skill", lambda variance, error: metrics.ratio(variance, error, members),
            tables["variance"], tables["square_error"])
    result = {"scores": scores,
              "nrmse_by_trajectory": tables["nrmse"].nanmean((1, 2)).tolist()}
    if "spectrum" in tables:
        result["spectrum"] = tables["spectrum"].mean(0).tolist()  # (leads, K)
    if "rank" in tables:
        result["rank_histogram"] = tables["rank"].mean(0).tolist()  # (T - 1, M + 1)
    return result


def weighted(weights, table):
    """Means (draws, ..) of the rows of a table (n, ..); what is NaN is left out."""
    there = ~table.isnan()
    total, share = (torch.einsum("dn,n...->d...", weights, part)
                    for part in (torch.where(there, table, 0.0), there.double()))
    return total / share


def record(whole, by_lead=None):
    """Row 0 is the value, the others are its resamplings."""
    out = {"all": whole[0].item(), "interval": metrics.interval(whole[1:]).tolist()}
    if by_lead is not None:
        low, high = metrics.interval(by_lead[1:]).tolist()
        out |= {"by_lead": by_lead[0].tolist(), "low": low, "high": high}
    return out


@torch.no_grad()
def show(task, forecasts, chosen, test, device):
    """Fields (n, T, *grid) of one channel: `truth`, forecasts, and spreads of ensembles."""
    s, c = start(task, chosen, test, device), 0
    fields = {"truth": s.u[:, :, c]}
    for name, forecast in forecasts.items():
        if name not in (*PROBES, *YARDSTICKS):
            means, spreads = [s.u[:, 0, c]], [torch.zeros_like(s.u[:, 0, c])]
            for p in forecast(s):
                means.append(p[:, :, c].mean(1))
                spreads.append(p[:, :, c].std(1, correction=int(p.shape[1] > 1)))
            fields[name] = torch.stack(means, 1)
            if p.shape[1] > 1:
                fields[f"{name} spread"] = torch.stack(spreads, 1)
    return {name: field.float().cpu() for name, field in fields.items()}
