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
from ups.eval.forecasts import LABELS, PROBES, start
from ups.rollout import roll_out, within
from ups.train.ranks import now
from ups.train.step import exact_inference

CHUNK = 16                # trajectories at a time, at most
CHUNK_BYTES = 256 << 20   # of fields that are held at a time
MEANS = ("nrmse", "rmse", "vrmse", "crps", "crps_block", "energy_score", "sample_nrmse", "crmse",
         "brmse", "drift")  # whose summary is a plain mean
LEADS = (1, 5, 10, 20, 40)  # that tables show
ROWS = 64  # trajectories that are timed together
BLOCK = 4  # points an axis of the blocks of `crps_block`


@exact_inference
def measure(accelerator, task, forecasts, chosen, only=None, members=1, title=None):
    """{forecast: {metric: table}} of the trajectories `chosen`. Every rank calls, and gets all.

    only     metrics to compute; all of them where it is None, and "truth" has the true spectrum
    members  the largest number of any forecast, for memory
    """
    facts, results = task.fields.facts, {}
    frame = 4 * len(facts.channels) * math.prod(facts.grid)
    size = max(1, min(CHUNK, CHUNK_BYTES // (frame * (facts.frames + 4 * members))))

    def tables(part):
        """{(forecast, metric): (B, T - 1, ..)}; spectra at some leads."""
        s = start(task, part, chosen, accelerator.device)
        rows, kept, energies = {}, spectrum_leads(s.steps + 1), {}
        if only is None or "spectrum_error" in only:
            energies = {k: metrics.spectrum(s.u[:, k:k + 1]) for k in range(1, s.steps + 1)}
        if only is None:
            rows["truth", "spectrum"] = [energies[k][:, 0].sum(1) for k in kept]
        for name, forecast in forecasts.items():
            wanted = ("nrmse",) if only is None and name in PROBES else only
            begin = now()
            for k, p in enumerate(forecast(s), start=1):
                each = 1e3 * (now() - begin) / len(s.u)
                scores = score(p, s.u[:, k], s.u[:, 0], task.conserved, energies.get(k), wanted)
                if wanted is None or "milliseconds" in wanted:
                    scores["milliseconds"] = torch.full((len(s.u),), each)
                for metric, value in scores.items():
                    if metric != "spectrum" or k in kept:
                        rows.setdefault((name, metric), []).append(value)
                begin = now()
        return {key: torch.stack(values, 1) for key, values in rows.items()}

    for (name, metric), table in by_trajectory(accelerator, tables, chosen, size, title).items():
        results.setdefault(name, {})[metric] = table
    return results


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
    return {name: accelerator.reduce(table.to(accelerator.device), reduction="sum").cpu()
            for name, table in whole.items()}


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
                 "rank": lambda: metrics.rank_histogram(p, y).mean(1)}
    return {name: make() for name, make in each.items() if only is None or name in only}


def spectrum_leads(frames):
    """The first, the middle and the last lead."""
    return sorted({1, frames // 2, frames - 1})


# summaries
def text_table(title, head, rows, form=".2e"):
    """Lines of text: `rows` are {label: values}; where a value is None there is a gap."""
    width = max(14, *(len(str(label)) + 1 for label in rows))
    lines = [f"\n{title}", " " * width + "".join(f"{name:>11}" for name in head)]
    lines += [f"{label:<{width}}" + "".join(
        " " * 11 if value is None else f"{value:11{form}}" for value in values)
        for label, values in rows.items()]
    return "\n".join(lines)


def score_table(title, found, columns, form=".3g"):
    """Means over all leads of forecasts {name: as of `summarise`}; columns {score: heading}. Last,
    where they were measured, milliseconds of a step of a member."""
    rows = {}
    for name, one in found.items():
        rows[LABELS[name]] = [one["scores"].get(key, {}).get("all") for key in columns]
        if timed := "milliseconds" in one:
            rows[LABELS[name]].append(one["milliseconds"] / one["members"])
    return text_table(title, [*columns.values(), *["ms/member"] * timed], rows, form)


def lead_table(title, found, channels):
    """nRMSE of forecasts {name: as of `summarise`} at some leads, and more where it is known."""
    rows = {}
    for name, one in found.items():
        errors, crps = one["scores"]["nrmse"], one["scores"].get("crps")
        leads = [lead for lead in LEADS if lead <= len(errors["by_lead"])]
        rows[LABELS[name]] = [*(errors["by_lead"][lead - 1] for lead in leads), errors["all"],
                              *([*errors["interval"], crps["all"]] if crps else [])]
    head = [*(f"step {lead}" for lead in leads), "all steps"]
    text = text_table(title, head + ["95 %: low", "high", "CRPS"] * bool(crps), rows)
    of = found["operator"]["scores"]["nrmse"].get("by_channel", [])
    return text + "\nof the channels, operator: " * bool(of) + ", ".join(
        f"{name} {error:.2e}" for name, error in zip(channels, of, strict=False))


def judge(accelerator, task, forecasts, chosen, seed=0, **options):
    """{forecast: what `summarise` tells of it}, and the tables of `measure`."""
    tables = measure(accelerator, task, forecasts, chosen, **options)
    return {name: summarise(tables[name], tables.get("operator"), task.fields.facts.dt, seed)
            for name in forecasts}, tables


def summarise(tables, base, dt, seed=0):
    """What is told of a forecast: members, milliseconds, and scores by lead and over all leads with
    bootstrap intervals; plain values for JSON.

    `base`: tables of the operator, to which ratios are formed, if any. dt: time between the leads.
    """
    count, scores = len(tables["nrmse"]), {}
    weights = torch.cat([torch.full((1, count), 1 / count, dtype=torch.float64),
                         metrics.resamplings(count, seed=seed)])
    known = {name: [tables[name]] for name in MEANS if name in tables}
    if "frmse" in tables:
        known |= {f"frmse_{band}": [tables["frmse"][..., k]]
                  for k, band in enumerate(("low", "mid", "high"))}
    if "rank" in tables:
        known |= {f"coverage_{share}": [metrics.coverage(tables["rank"], share / 100)]
                  for share in (50, 90)}
    if base and tables is not base:
        known |= {f"{name}_ratio": [tables[name], base[name]]
                  for name in ("nrmse", "crps") if name in tables}
    known |= {name: tables[name].unbind(-1)
              for name in ("spectrum_error", "spread_skill") if name in tables}
    for name, parts in known.items():  # (n, T) or (n, T, C): means over channels, then the ratio
        over = [_weighted(weights, part.nanmean(2) if part.ndim > 2 else part) for part in parts]
        pair = []
        for means in ([part.nanmean(1) for part in over], over):
            value = torch.divide(*means) if means[1:] else means[0]
            pair.append(value.sqrt() if name == "spread_skill" else value)
        scores[name] = _record(*pair)
        if len(parts) == 1 and parts[0].ndim > 2 and parts[0].shape[2] > 1:
            scores[name]["by_channel"] = parts[0].nanmean((0, 1)).tolist()
    if "max_error" in tables:
        worst = tables["max_error"]
        scores["max_error"] = {"all": worst.max().item(), "by_lead": worst.amax((0, 2)).tolist()}
    if "size" in tables:
        length = metrics.correlation_time(tables["correlation"], dt)
        relative = metrics.relative_l2(tables["rmse"], tables["size"])
        for name, table in (("correlation_time", length), ("relative_l2", relative)):
            scores[name] = _record(_weighted(weights, table.nanmean(1)))
    result = {"members": 1, "scores": scores}
    if "rank" in tables:
        result |= {"members": tables["rank"].shape[2] - 1,
                   "rank": tables["rank"].mean((0, 1)).tolist()}
    if "milliseconds" in tables:  # of a step of one trajectory
        result["milliseconds"] = tables["milliseconds"].median().item()
    if "spectrum" in tables:
        result["spectrum"] = tables["spectrum"].mean(0).tolist()  # (leads, K)
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


@exact_inference
def plan_rows(accelerator, task, index, operator, test):
    """For each plan the error and the seconds of a trajectory, to all frames and to the last."""
    facts, rows = task.fields.facts, []
    most = CHUNK_BYTES // (4 * len(facts.channels) * math.prod(facts.grid) * facts.frames)
    s = start(task, test[:max(1, min(ROWS, most))], test, accelerator.device)
    for longest in task.plans:
        row = {"longest": longest}
        for name, leads in (("all", range(1, s.steps + 1)), ("last", [s.steps])):
            for _ in range(2):  # the first one warms up
                begin, frames = now(), {}
                z0 = task.encode(s.whole[:, :task.history]).squeeze(1)
                for lead, z in roll_out(operator, z0, s.dt, s.cond, index, leads,
                                        within(task.plans, longest), s.inputs):
                    frames[lead] = task.decode(z)
                seconds = now() - begin
            u = torch.stack([frames[lead] for lead in leads], 1)
            row |= {f"nrmse_{name}": metrics.nrmse(u, s.u[:, list(leads)]).mean().item(),
                    f"seconds_{name}": seconds / len(s.u)}
        rows.append(row)
    if accelerator.is_main_process:
        print(text_table(f"{task.name}: nRMSE and seconds of a trajectory, {len(s.u)} together, "
                         "by the longest step in frames",
                         ["all frames", "seconds", f"frame {s.steps}", "seconds"],
                         {longest: values for longest, *values in map(dict.values, rows)}))
    return rows


def best_median_worst(table, chosen):
    """Three of the trajectories `chosen`, by their nRMSE in a table (n, T - 1, C)."""
    order = table.nanmean((1, 2)).argsort()
    return chosen[order[[0, len(order) // 2, -1]]]


def by_lead(tables):
    """Errors {forecast: (n, T - 1)} of the operator between its yardsticks, for pictures."""
    return {name: tables[name]["nrmse"].nanmean(2).numpy()
            for name in ("persistence", "operator", "codec")}
