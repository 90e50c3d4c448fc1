"""The data of an evaluation: the run's own, or others of which all is test; none are ever made.

A roll-out begins at the first frame, or where PDEBench's do: after ten frames.
"""

import dataclasses
import math
from types import SimpleNamespace

from ups.config import UsageError
from ups.data.fields import Fields
from ups.data.find import NoData
from ups.data.find import open_data as find_fields
from ups.latents import load_tasks
from ups.stages import inherit
from ups.train.ranks import on_main

GIVEN = 10  # frames that PDEBench gives, of which an operator sees the last
PROTOCOLS = ("initial", "pdebench")


def open_data(accelerator, cfg, operator):
    """Tasks of the operator (Loaded), with fields that begin where the protocol begins."""
    known, tasks = load_tasks(operator, accelerator.device), []
    for fields in on_main(accelerator, _find, cfg, operator):
        name = fields.facts.name if len(known) > 1 else next(iter(known))
        if name not in known:
            raise UsageError(f"{fields.files[0].path}: {cfg.run} knows no {name}; it knows "
                             f"{', '.join(known)}. Give the data that name in --facts.")
        if operator.config["lineage"].get(f"data of {name}") != fields.digest:
            if not cfg.data:
                raise UsageError(f"{cfg.run}: the data of {name} are not those of the training; "
                                 "put them back, or give --data to judge the run on these.")
            fields = _as_test(fields, known[name].facts)
        begun = begin(fields, cfg.protocol, operator.history)
        tasks.append(dataclasses.replace(known[name], fields=begun))
    return tasks


def _find(cfg, operator):
    source = inherit(SimpleNamespace(run=cfg.run), operator)
    source.data = cfg.data or source.data
    try:
        return find_fields(source, make=False)
    except NoData as error:
        raise error if cfg.data else NoData(
            f"{error} Where the data of {cfg.run} have moved, say where: --data.") from None


def _as_test(fields, facts):
    """Other data than those of the training, all of them test, with the facts of the training."""
    path = fields.files[0].path
    for what in ("channels", "inputs", "axes", "grid", "boundary", "params", "dt"):
        ours, theirs = (getattr(one, what) for one in (facts, fields.facts))
        if not (math.isclose(ours, theirs, rel_tol=1e-4) if what == "dt" else ours == theirs):
            raise UsageError(f"{path}: its {what} {'is' if what == 'dt' else 'are'} {theirs}, of "
                             f"the training {ours}; only the same can be judged.")
    fields = Fields(fields.files, fields.stride_x, fields.frames.step, all_test=True)
    fields.facts = dataclasses.replace(facts, frames=fields.facts.frames)
    print(f"{facts.name}: {path} is other data than the training had; all {len(fields)} "
          "trajectories are test.")
    return fields


def begin(fields, protocol, history=1):
    """The fields from the first frame that a roll-out sees; all frames after those count."""
    file, step, frames, given = fields.files[0], fields.frames.step, fields.facts.frames, history
    if protocol == "pdebench" and not fields.facts.steady:
        given, frames = GIVEN, -(-file.facts.frames // step)
    if not history <= given < frames:
        raise UsageError(f"{file.path} has {frames} frames at --stride_t {step}; --protocol "
                         f"{protocol} gives {given} of them, and the operator sees {history}; use "
                         "--protocol initial, or longer data.")
    return fields if given == history else Fields(
        fields.files, fields.stride_x, step, (given - history) * step, fields.all_test)


def in_words(facts, protocol, history=1):
    """The protocol in a phrase."""
    grid = " x ".join(map(str, facts.grid)) + " points"
    if facts.steady:
        return f"a steady field; {grid}"
    steps = f"{facts.frames - 1} step{'s' * (facts.frames > 2)} of {facts.dt:g}"
    if protocol == "initial":
        return f"rolled out from {history} true frame{'s' * (history > 1)} over {steps}; {grid}"
    return (f"PDEBench: {GIVEN} frames given, of which the operator sees the last {history}; "
            f"scored on the {steps} after them; {grid}")
