"""`inspect` says in words what data hold; `validate` reads all of them and names every fault."""

import math
import os
import shlex
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.check import contradictions, proposals, uses
from ups.data.fields import SPLITS
from ups.data.file import pieces
from ups.data.find import fields_of, find, free_run, open_data, read_facts
from ups.eval import plots

SHOWN = 10  # samples that are named


def inspect(source, picture=None):
    """Print what `source` names, which has the flags of a script; draw where `picture` is a path.

    An empty path is one beside the data.
    """
    flags = " ".join(f"--{name} {shlex.join([value] if isinstance(value, str) else value)}"
                     for name in ("data", "axes", "facts", "tasks")
                     if (value := getattr(source, name)))
    for fields in open_data(source, make=False):
        facts, path = fields.facts, fields.files[0].path
        whole = Path(os.path.commonpath([file.path for file in fields.files]))
        print(f"{whole}: {facts.name}")
        wrong = [("WRONG", one) for one in contradictions(fields)]
        maybe = [("you may say", one) for one in proposals(fields)]
        for name, text in (*_described(fields), *wrong, *maybe):
            print(f"  {name:15s} {text}")
        script = f"train_{'steady' if facts.steady else 'operator'}.py"
        print("Correct that first, in the file or by --facts." if wrong else
              f"Train on it: accelerate launch {script} {flags} --run "
              f"{shlex.quote(str(free_run(facts.name)))}")
        if picture is not None:
            png = Path(picture or (whole if whole.name else path).with_suffix(".png"))
            if png.suffix != ".png" or png.resolve() == path.resolve():
                raise UsageError(f"--plot {png}: name a file of its own that ends in .png.")
            plots.picture(png, plots.draw_data, fields)


def _described(fields):
    """Yield (name, text) of what training would see."""
    facts, files, look = fields.facts, fields.files, fields.look
    if facts.equation:
        yield "equation", facts.equation
    yield "parameters", ", ".join(
        f"{name} = {scale.low:g}" + f" to {scale.high:g}" * (scale.high > scale.low)
        for name, scale in zip(facts.params, facts.scales, strict=True)) or "none"
    yield "samples", (f"{sum(file.samples for file in files):,} in {len(files)} "
                      f"file{'s' * (len(files) > 1)}: "
                      + ", ".join(f"{name} {len(fields.split(name)):,}" for name in SPLITS)
                      + ", split in time" * fields.in_time)
    first, last = (files[0].times[fields.frames[k]] for k in (0, -1))
    yield "time", "none: the fields answer the inputs" if facts.steady else (
        f"{facts.frames} frames, t = {first:g} to {last:g}, dt = {facts.dt:g}"
        + f"; training starts at frame {facts.first_frame}" * bool(facts.first_frame))
    for axis, n, (low, high), kind, jump in zip(facts.axes, facts.grid, facts.domain,
                                                facts.boundary, look.seams, strict=True):
        yield f"axis {axis}", (
            f"{n} points in ({low + 0:g}, {high:g}), spacing {(high - low) / n:g}, {kind}: "
            + (f"the jump across its ends is {jump:.2f} times those inside" if jump < math.inf
               else "both ends are always equal"))
    for what, seen in (("channel", look.seen), ("input", look.given)):
        for c, name in enumerate(seen.names if seen else ()):
            mean = seen.mean[..., c]
            std = np.sqrt(np.square(seen.deviation[:, c]).mean() + mean.mean(1).var())
            yield f"{what} {name}", (
                f"{seen.low[:, c].min():.4g} to {seen.high[:, c].max():.4g}, mean "
                f"{mean.mean():.4g}, std {std:.4g} (of {len(look.rows)} trajector"
                f"{'y' if len(look.rows) == 1 else 'ies'})")
    yield "is used", uses(facts)


def validate(source):
    """Read everything, in bounded pieces: the faults of files and of facts, a sentence each."""
    faults, sets = [], defaultdict(list)
    for path in source.data:
        try:
            found = find((path,), source.tasks, source.axes, read_facts(source.facts))
            for name, files in found.items():
                sets[name] += files
        except UsageError as error:
            faults.append(str(error))
    for files in sets.values():
        wrong = [f"{file.path}: {fault}" for file in files for fault in _read_all(file)]
        try:
            wrong = wrong or [f"{files[0].path}: {sentence}"
                              for sentence in contradictions(fields_of(files))]
        except UsageError as error:
            wrong = [str(error)]
        faults += wrong
    return faults


def _read_all(file):
    """Faults of one file: samples that cannot be read, and values that are no numbers."""
    facts, faults, unread = file.facts, [], {}
    for names, frames in ((facts.channels, facts.frames),
                          (facts.inputs, facts.frames if facts.inputs_vary else 1)):
        holes, always, ever = Counter(), True, False  # bad values of a sample, and their points
        size = 4 * len(names) * math.prod(facts.grid)
        for row in range(file.samples) if names else ():
            try:
                for _, span in pieces(1, frames, size):
                    bad = ~np.isfinite(file.read([row], range(frames)[span], 1, names)[0])
                    holes[row] += int(bad.sum())
                    always, ever = always & bad.all(0), ever | bad.any(0)
            except UsageError as error:
                why = " ".join(str(error.__cause__ or error).split())
                unread[row] = f"sample {row} cannot be read ({why})."
        if holes := +holes:
            some, cure = [*holes][:SHOWN], "not always at the same points: leave those samples out."
            if np.array_equal(always, ever):
                cure = ("always at the same points: fill them, and add a channel that marks them "
                        "to `inputs`.")
            share, more = 400 * holes[some[0]] / (frames * size), ", .." * (len(holes) > SHOWN)
            faults.append(f"NaN or Inf in {len(holes)} of {file.samples} samples "
                          f"({', '.join(map(str, some))}{more}), in {share:.3g} % of the values of "
                          f"the first, {cure}")
    faults += [*unread.values()][:SHOWN]
    return faults + [f"and {len(unread) - SHOWN} more of this kind."] * (len(unread) > SHOWN)
