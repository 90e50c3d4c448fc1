"""`inspect` says in words what data hold; `validate` reads all of them and names every fault."""

import hashlib
import math
import os
import shlex
from collections import defaultdict
from pathlib import Path

import numpy as np

from ups.config import UsageError
from ups.data.check import contradictions, proposals, seam, uses
from ups.data.fields import SPLITS
from ups.data.file import UnreadableSamples, pieces
from ups.data.find import fields_of, find, free_run, open_data, read_facts

SHOWN = 10  # faults of one kind that are spelled out


def inspect(source, picture=None):
    """Print what `source` names, which has the flags of a script; draw where `picture` is a path.

    An empty path is one beside the data.
    """
    flags = {name: getattr(source, name) for name in ("data", "axes", "facts", "tasks")}
    flags = " ".join(f"--{name} {shlex.join([value] if isinstance(value, str) else value)}"
                     for name, value in flags.items() if value)
    for fields in open_data(source, make=False):
        print(_describe(fields, flags))
        if picture is not None:
            path = fields.files[0].path
            png = Path(picture or path.with_suffix(".png"))
            if png.suffix != ".png" or png.resolve() == path.resolve():
                raise UsageError(f"--plot {png}: name a file of its own that ends in .png.")
            plot(fields, png)
            print(f"picture: {png}")


def _describe(fields, flags):
    facts, files = fields.facts, fields.files
    look, times = fields.look, files[0].times
    count = sum(file.samples for file in files)
    sizes = ", ".join(f"{name} {len(fields.split(name)):,}" for name in SPLITS)
    lines = [("equation", facts.equation)] if facts.equation else []
    lines += [("parameters", ", ".join(
        f"{name} = {scale.low:g}" + f" to {scale.high:g}" * (scale.high > scale.low)
        for name, scale in zip(facts.params, facts.scales, strict=True)) or "none")]
    lines += [("samples", f"{count:,} in {len(files)} file{'s' * (len(files) > 1)}: {sizes}"
               + ", split in time" * fields.in_time)]
    lines += [("time", "none: the fields answer the inputs" if facts.steady else
               f"{facts.frames} frames, t = {times[fields.frames[0]]:g} to "
               f"{times[fields.frames[-1]]:g}, dt = {facts.dt:g}"
               + f"; training starts at frame {facts.first_frame}" * bool(facts.first_frame))]
    for axis, n, (low, high), kind, jump in zip(facts.axes, facts.grid, facts.domain,
                                                facts.boundary, seam(files[0]), strict=True):
        lines += [(f"axis {axis}", f"{n} points in ({low + 0:g}, {high:g}), spacing "
                   f"{(high - low) / n:g}, {kind}: the jump across its ends is {jump:.2f} times "
                   "those inside")]
    for what, seen in (("channel", look.seen), ("input", look.given)):
        for c, name in enumerate(seen.names if seen else ()):
            mean = seen.mean[..., c]
            std = np.sqrt(np.square(seen.scale[:, c]).mean() + mean.mean(1).var())
            lines += [(f"{what} {name}", f"{seen.low[:, c].min():.4g} to "
                       f"{seen.high[:, c].max():.4g}, mean {mean.mean():.4g}, std {std:.4g} "
                       f"(of {len(look.rows)} trajectories)")]
    lines += [("is used", uses(facts))]
    wrong = list(contradictions(fields))
    lines += [("WRONG", sentence) for sentence in wrong]
    lines += [("you may say", sentence) for sentence in proposals(fields)]
    script = "train_steady.py" if facts.steady else "train_operator.py"
    last = ("Correct that first, in the file or by --facts." if wrong else
            f"Train on it: accelerate launch {script} {flags} --run "
            f"{shlex.quote(str(free_run(facts.name)))}")
    width = max(16, *(len(name) + 2 for name, _ in lines))
    where = os.path.commonpath([file.path for file in files])
    return "\n".join([f"{where}: {facts.name}",
                      *(f"  {name:{width}s}{text}" for name, text in lines), last])


def plot(fields, png):
    """Draw each channel in a row: four trajectories over (x, t), or five frames of the first."""
    from matplotlib.figure import Figure

    facts, times = fields.facts, fields.files[0].times[fields.frames.start:]
    if len(facts.grid) == 1:
        panels = {f"trajectory {row}": fields.read([row]).numpy()[0].swapaxes(0, 1)
                  for row in range(min(4, len(fields)))}
    else:
        step = slice(int(facts.steady), None, max(1, (facts.frames - 1) // 4))
        u = fields.read([0], step).numpy()[0]
        u = u[:, :, u.shape[2] // 2] if len(facts.grid) == 3 else u  # the middle plane
        panels = {f"t = {t:.3g}": frame for t, frame in zip(times[step], u, strict=False)}
    figure = Figure((2.2 * len(panels) + 1, 2.2 * len(facts.channels) + 0.4), layout="compressed")
    grid = figure.subplots(len(facts.channels), len(panels), squeeze=False)
    for c, name in enumerate(facts.channels):
        values = np.stack([u[c] for u in panels.values()])
        for axis, (title, u) in zip(grid[c], panels.items(), strict=True):
            shown = axis.imshow(u[c], origin="lower", aspect="auto", vmin=values.min(),
                                vmax=values.max())
            axis.set(title=title if c == 0 else "", xticks=[], yticks=[])
        figure.colorbar(shown, ax=grid[c].tolist(), label=name)
    figure.savefig(png, dpi=130)


def validate(source):
    """Read everything, in bounded pieces: the faults of files, of facts, and between splits."""
    faults, sets = [], defaultdict(list)
    for path in source.data:
        try:
            found = find((path,), source.tasks, source.axes, read_facts(source.facts))
        except UsageError as error:
            faults.append(str(error))
        else:
            for name, files in found.items():
                sets[name] += files
    for name, files in sets.items():
        digests = {}  # of trajectories: {(path, row): fingerprint}
        wrong = [f"{file.path}: {fault}" for file in files for fault in _read_all(file, digests)]
        try:
            if not wrong:
                fields = fields_of(name, files)
                wrong = _twice(fields, digests) + [
                    f"{files[0].path}: {sentence}" for sentence in contradictions(fields)]
        except UsageError as error:
            wrong = [str(error)]
        faults += wrong
    return faults


def _read_all(file, digests):
    """Faults of one file; adds the fingerprints of its trajectories to `digests`."""
    facts, faults, unread = file.facts, [], {}
    prints = [hashlib.blake2b(digest_size=16) for _ in range(file.samples)]
    for names, frames in ((facts.channels, facts.frames),
                          (facts.inputs, facts.frames if facts.inputs_vary else 1)):
        low, high, holes = np.inf, -np.inf, defaultdict(float)  # holes: share of each sample's
        always, ever = True, False  # .. values, and at which points
        for row, u in _rows(file, names, frames, unread) if names else ():
            prints[row].update(np.ascontiguousarray(u))
            bad, rest = ~np.isfinite(u), (0, *range(2, u.ndim))
            if bad.any():
                holes[row] += bad.sum() / (frames * bad[0].size)
            always, ever = always & bad.all(0), ever | bad.any(0)
            low, high = np.fmin(low, np.fmin.reduce(u, rest)), np.fmax(
                high, np.fmax.reduce(u, rest))
        if holes:
            first, cure = min(holes), "not always at the same points: leave those samples out."
            if np.array_equal(always, ever):
                cure = ("always at the same points: fill them, and add a channel that marks them "
                        "to `inputs`.")
            faults.append(f"NaN or Inf in {len(holes)} of {file.samples} samples, first in "
                          f"{first}, {100 * holes[first]:.3g} % of its values, {cure}")
        faults += [f"{name} is constant ({value:g})." for name, value, same in zip(
            names, np.atleast_1d(low), np.atleast_1d(low == high), strict=False) if same]
    digests.update({(file.path, row): one.digest() for row, one in enumerate(prints)
                    if row not in unread})
    return faults + _some([f"sample {row} cannot be read ({why})." for row, why in unread.items()])


def _rows(file, names, frames, unread):
    """Yield (row, u (T, C, *grid)) in pieces; where one fails, row by row, so as to name it."""
    for rows, span in pieces(file.samples, frames, 4 * len(names) * math.prod(file.facts.grid)):
        rows, span = range(file.samples)[rows], range(frames)[span]
        try:
            yield from zip(rows, file.read(rows, span, 1, names), strict=True)
        except UnreadableSamples:
            for row in rows:
                try:
                    yield row, file.read([row], span, 1, names)[0]
                except UnreadableSamples as error:
                    unread[row] = error.why


def _twice(fields, digests):
    """Trajectories that are in two splits."""
    split = {(fields.files[fields.owner[i]].path, int(fields.row[i])): name for name in SPLITS
             for i in fields.split(name)}
    first, faults = {}, []
    for (path, row), digest in digests.items() if not fields.in_time else ():
        where = split[path, row], f"sample {row} of {path}"
        other = first.setdefault(digest, where)
        if other[0] != where[0]:
            faults.append(f"{where[1]} ({where[0]}) is {other[1]} ({other[0]}) again.")
    return _some(faults)


def _some(faults):
    more = len(faults) - SHOWN
    return faults[:SHOWN] + ([f"and {more} more of this kind."] if more > 0 else [])
