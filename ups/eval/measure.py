"""Measure forecasts in physical units: the one place where a prediction meets the stored solution.

    trajectories -> start -> forecast: members (B, M, C, *grid) of lead 1, 2, .. -> score -> tables

A table has a row for each trajectory and a column for each lead (n, T - 1, C, ..), so that means,
ratios and intervals can be formed of it. Some trajectories, one lead at a time, are in memory.
Every rank takes its share of them, in chunks that any number of processes has alike: so is each
bit of a table, on a CPU. Errors of an ensemble are those of its mean.
"""

import functools
import math

import torch
from accelerate.utils import DistributedType
from tqdm import tqdm

from ups.eval import metrics
from ups.eval.forecasts import PROBES, start
from ups.train.ranks import now
from ups.train.step import exact_inference

CHUNK = 16                # trajectories at a time, at most
CHUNK_BYTES = 256 << 20   # of fields that are held at a time
MEANS = ("nrmse", "rmse", "vrmse", "mae", "crps", "crps_block", "energy_score", "sample_nrmse",
         "crmse", "brmse", "drift", "coverage_50", "coverage_90")  # whose summary is a plain mean
LEADS = (1, 5, 10, 20, 40)  # that tables show
BLOCK = 4  # points an axis of the blocks of `crps_block`


@exact_inference
@torch.no_grad()
def measure(accelerator, task, forecasts, chosen, only=None, members=1, title=None):
    """{forecast: {metric: table}} of the trajectories `chosen`, and {forecast: milliseconds} of a
    step of one trajectory. Every rank calls, and gets all.

    only     metrics to compute; all of them where it is None, and "truth" has the true spectrum
    members  the largest number of any forecast, for memory
    """
    facts, seconds, results = task.fields.facts, {name: [] for name in forecasts}, {}
    frame = 4 * len(facts.channels) * math.prod(facts.grid)
    size = max(1, min(CHUNK, CHUNK_BYTES // (frame * (facts.frames + 4 * members))))

    def tables(part):
        """{(forecast, metric): (B, T - 1, ..)}; spectra at some leads."""
        s = start(task, part, chosen, accelerator.device)
        rows, kept, energies = {}, spectrum_leads(s.steps + 1), {}
        if only is None or "spectrum_error" in only:
            energies = {k: metrics.spectrum(s.u[:, k:k + 1]) for k in range(1, s.steps + 1)}
            rows["truth", "spectrum"] = [energies[k][:, 0].sum(1) for k in kept]
        for name, forecast in forecasts.items():
            wanted, begin = ("nrmse",) if only is None and name in PROBES else only, now()
            for k, p in enumerate(forecast(s), start=1):
                seconds[name].append((now() - begin) / len(s.u))
                scores = score(p, s.u[:, k], s.u[:, 0], task.conserved, energies.get(k), wanted)
                for metric, value in scores.items():
                    if metric != "spectrum" or k in kept:
                        rows.setdefault((name, metric), []).append(value)
                begin = now()
        return {key: torch.stack(values, 1) for key, values in rows.items()}

    for (name, metric), table in by_trajectory(accelerator, tables, chosen, size, title).items():
        results.setdefault(name, {})[metric] = table
    return results, {name: 1e3 * float(torch.tensor(t).median()) for name, t in seconds.items()}


def by_trajectory(accelerator, tables, chosen, size, title=None):
    """`tables(some of chosen)`, a dictionary of (B, ..), for all of them: (n, ..), on every rank.

    `size` trajectories at a time; the ranks, in turn, all call equally often. A forward of FSDP2
    is a collective, so there all have equally many rows too. `title`: of a bar.
    """
    whole, world = {}, accelerator.num_processes
    sharded = accelerator.distributed_type == DistributedType.FSDP
    for first in tqdm(range(0, len(chosen), size * world), title, unit="chunk",
                      disable=title is None or not accelerator.is_main_process):
        begin = first + size * accelerator.process_index
        own = chosen[begin : begin + size]  # of the last ranks fewer, or none
        wanted = min(size, len(chosen) - first) if sharded else 1
        more = chosen[:1].expand(max(0, wanted - len(own)))
        for name, table in tables(torch.cat([own, more])).items():
            if name not in whole:
                shape = len(chosen), *table.shape[1:]
                whole[name] = torch.zeros(shape, dtype=torch.float64)
            whole[name][begin : begin + size] = table[: len(own)].double().cpu()
    if world > 1:
        for name, table in whole.items():
            table = table.to(accelerator.device)
            whole[name] = accelerator.reduce(table, reduction="sum").cpu()
    return whole


def score(p, y, u0, conserved=(), energy=None, only=None):
    """Metrics (B, C, ..) of members p (B, M, C, *grid) against y (B, C, *grid) of one lead."""
    mean, y1 = p.mean(1, keepdim=True), y[:, None]
    own = functools.cache(lambda: metrics.spectrum(p).mean(1, keepdim=True))
    each = {name: lambda f=f: f(mean.double(), y1.double())[:, 0]
            for name, f in metrics.FIELD.items()}
    each |= {"nrmse": lambda: metrics.channel_nrmse(mean, y1)[:, 0],
             "crps": lambda: metrics.crps(p, y),
             "crps_block": lambda: metrics.crps(metrics.block_means(p, BLOCK),
                                                metrics.block_means(y1, BLOCK)[:, 0])}
    if conserved:
        each["drift"] = lambda: metrics.drift(mean.double(), u0.double(), conserved)[:, 0]
    if energy is not None:
        each |= {"spectrum": lambda: own()[:, 0].sum(1),
                 "spectrum_error": lambda: torch.stack(
                     metrics.spectrum_error(own(), energy, y.shape[2:]), -1)[:, 0]}
    if p.shape[1] > 1:
        each |= {"energy_score": lambda: metrics.energy_score(p, y),
                 "spread_skill": lambda: torch.stack(metrics.spread_skill(p, y), -1),
                 "sample_nrmse": lambda: metrics.channel_nrmse(p[:, :1], y1)[:, 0],
                 "coverage_50": lambda: metrics.coverage(p, y, 0.5),
                 "coverage_90": lambda: metrics.coverage(p, y, 0.9),
                 "rank": lambda: metrics.rank_histogram(p, y).mean(1)}
    return {name: make() for name, make in each.items() if only is None or name in only}


def spectrum_leads(frames):
    """The first, the middle and the last lead."""
    return sorted({1, frames // 2, frames - 1})


# summaries
def text_table(title, head, rows, width=14, form=".2e"):
    """Lines of text: `rows` are {label: values}; where a value is None there is a gap."""
    lines = [f"\n{title}", " " * width + "".join(f"{name:>11}" for name in head)]
    lines += [f"{label:<{width}}" + "".join(
        " " * 11 if value is None else f"{value:11{form}}" for value in values)
        for label, values in rows.items()]
    return "\n".join(lines)


def lead_table(title, scores, more=(), **options):
    """nRMSE at some leads: `scores` are {label: (record as of `summarise`, what follows it)}."""
    steps = len(next(iter(scores.values()))[0]["by_lead"])
    leads = [lead for lead in LEADS if lead <= steps]
    head = [*(f"step {lead}" for lead in leads), "all steps", *more]
    return text_table(title, head, {
        label: [*(score["by_lead"][lead - 1] for lead in leads), score["all"], *rest]
        for label, (score, rest) in scores.items()}, **options)


def summarise(tables, base, facts, members=1, seed=0):
    """Means, by lead and over all leads, with bootstrap intervals: plain values for JSON.

    `base`: the tables of the forecast to which ratios are formed.
    """
    count, scores = len(tables["nrmse"]), {}
    weights = torch.cat([torch.full((1, count), 1 / count, dtype=torch.float64),
                         metrics.resamplings(count, seed=seed)])
    known = {name: (table,) for name, table in tables.items() if name in MEANS}
    for band, name in enumerate(("low", "mid", "high") if "frmse" in tables else ()):
        known[f"frmse_{name}"] = tables["frmse"][..., band],
    for name in ("nrmse", "crps"):
        if name in tables and tables is not base:
            known[f"{name}_ratio"] = tables[name], base[name]
    for name in ("spectrum_error", "spread_skill"):
        if name in tables:
            known[name] = tables[name].unbind(-1)
    for name, parts in known.items():  # (n, T) or (n, T, C): means over channels, then the ratio
        of = functools.partial(metrics.ratio, members=members)
        combine = of if name == "spread_skill" else torch.divide if parts[1:] else torch.clone
        over = [_weighted(weights, part.nanmean(2) if part.ndim > 2 else part) for part in parts]
        scores[name] = _record(combine(*(part.nanmean(1) for part in over)), combine(*over))
    if "max_error" in tables:
        worst = tables["max_error"]
        scores["max_error"] = {"all": worst.max().item(), "by_lead": worst.amax((0, 2)).tolist()}
    if "size" in tables:
        length = metrics.correlation_time(tables["correlation"], facts.dt)
        relative = metrics.relative_l2(tables["rmse"], tables["size"])
        for name, table in (("correlation_time", length), ("relative_l2", relative)):
            scores[name] = _record(_weighted(weights, table.nanmean(1)))
    result = {"members": members, "scores": scores,
              "nrmse_by_trajectory": tables["nrmse"].nanmean((1, 2)).tolist()}
    for name in ("spectrum", "rank"):  # (leads, K) and (T - 1, M + 1)
        if name in tables:
            result[name] = tables[name].mean(0).tolist()
    return result


def _weighted(weights, table):
    """Means (draws, ..) of the rows of a table (n, ..); what is NaN is left out."""
    return weights @ table.nan_to_num(0.0, torch.inf) / (
        weights @ (~table.isnan()).double())


def _record(whole, by_lead=None):
    """Row 0 is the value, the others are its resamplings."""
    out = {"all": whole[0].item(), "interval": metrics.interval(whole[1:]).tolist()}
    if by_lead is not None:
        low, high = metrics.interval(by_lead[1:]).tolist()
        out |= {"by_lead": by_lead[0].tolist(), "low": low, "high": high}
    return out


@exact_inference
@torch.no_grad()
def show(accelerator, task, forecasts, chosen, test):
    """Fields (n, T, *grid) of the first channel: `truth`, forecasts, and spreads of ensembles."""
    s = start(task, chosen, test, accelerator.device)
    fields = {"truth": s.u[:, :, 0]}
    for name, forecast in forecasts.items():
        means, spreads = [s.u[:, 0, 0]], [torch.zeros_like(s.u[:, 0, 0])]
        for p in forecast(s):
            means.append(p[:, :, 0].mean(1))
            spreads.append(p[:, :, 0].std(1, correction=int(p.shape[1] > 1)))
        fields[name] = torch.stack(means, 1)
        if p.shape[1] > 1:
            fields[f"{name} spread"] = torch.stack(spreads, 1)
    return {name: field.float().cpu().numpy() for name, field in fields.items()}


def best_median_worst(table, chosen):
    """Three of the trajectories `chosen`, by their nRMSE in a table (n, T - 1, C)."""
    order = table.nanmean((1, 2)).argsort()
    return chosen[order[[0, len(order) // 2, -1]]]


def by_lead(tables):
    """Errors {forecast: (n, T - 1)} of trajectories, for pictures."""
    return {name: table["nrmse"].nanmean(2).numpy() for name, table in tables.items()}
