"""Trajectories of one data set, from all its files, with the facts that are true of them.

All trajectories have equally many frames: longer ones are cut into pieces of the shortest length,
which share their end frames. The split is by sample (train, fit, val, test = 80, 5, 5, 10 %), or as
the folders say, or, of fewer than four samples, in time with a gap between the parts. Files of a
family share sample indices, since published files share initial conditions by index.
"""

import hashlib
import math
import sys
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from ups.config import UsageError
from ups.data.check import SEAM, Look, seam, shiftable
from ups.data.facts import check_facts, scale_of
from ups.data.file import natural, pieces

SPLITS = ("train", "fit", "val", "test")
CUTS = 40  # pieces in time of a long trajectory that is split for itself


class Fields:
    """Lazy view of the files of one data set; holds no handle, so any process may use it."""

    def __init__(self, files, stride_x=1, stride_t=1, first_frame=None, all_test=False):
        self.files, self.stride_x, self.all_test = _in_order(files), stride_x, all_test
        facts = self.files[0].facts
        where = self.files[0].path
        check_facts(facts, where)
        for other in self.files[1:]:
            for what in ("grid", "channels", "inputs", "axes", "params", "boundary", "domain"):
                _agree(self.files[0], other, what, getattr(facts, what), getattr(other.facts, what))
            if not math.isclose(other.facts.dt, facts.dt, rel_tol=1e-4):
                _agree(self.files[0], other, "the time step", facts.dt, other.facts.dt)
        if wrong := [n for n in facts.grid if n % stride_x]:
            raise UsageError(f"--stride_x {stride_x} does not divide the {wrong[0]} points of "
                             f"{where}; {_divisors(wrong[0])} do.")
        if facts.steady:  # its two frames are no time series
            first, stride_t = 0, 1
        else:
            first = facts.first_frame if first_frame is None else first_frame
        self.frames = range(first, min(file.facts.frames for file in self.files), stride_t)
        if len(self.frames) < 2:
            raise UsageError(f"{where}: of {self.frames.stop} frames the first {first} are left "
                             f"out and every {stride_t}th of the others is taken, so fewer than "
                             "two are left; use longer data, or a smaller --stride_t.")
        self._lay_out()
        facts = replace(
            facts, grid=tuple(n // stride_x for n in facts.grid), frames=len(self.frames),
            dt=facts.dt * stride_t, first_frame=first,
            scales=tuple(map(scale_of, self.params(
                self.split("test" if all_test else "train")).unbind(1))))
        self.facts = self._tested(facts)

    def _lay_out(self):
        """The trajectories: file, row, piece in time, sample; those of one sample stay together."""
        count, step = len(self.frames), self.frames.step
        samples = sum(file.samples for file in self.files)
        whole = min(len(range(self.frames.start, f.facts.frames, step)) for f in self.files)
        self.in_time = samples < 4 and not self.all_test and not any(f.split for f in self.files)
        if self.in_time:
            if whole <= CUTS:
                raise UsageError(
                    f"{self.files[0].path}: {samples} trajector{'y' if samples == 1 else 'ies'} of "
                    f"{whole} frames cannot be split into train, fit, val and test; give four "
                    f"trajectories, or more than {CUTS} frames.")
            count = (whole - 1) // CUTS + 1
            self.frames = self.frames[:count]
        rows = []
        for k, file in enumerate(self.files):
            there = len(range(self.frames.start, file.facts.frames, step))
            parts = CUTS if self.in_time else max(1, (there - 1) // (count - 1))
            rows += [(k, row, part) for row in range(file.samples) for part in range(parts)]
        self.owner, self.row, self.part = np.array(rows, dtype=np.int64).T
        starts = np.cumsum([0] + [file.samples for file in self.files])
        self.sample = starts[self.owner] + self.row
        if self.files[0].family:  # files of one parameter are joined, of others run side by side
            self.sample = self._beside(starts)[self.sample]

    def _beside(self, starts):
        """The index of a sample among those of its own parameters."""
        sets = {}
        for k, file in enumerate(self.files):
            sets.setdefault(tuple(file.params[0]), []).append(k)
        index, sizes = np.empty(starts[-1], np.int64), {}
        for value, members in sets.items():
            rows = np.concatenate([np.arange(starts[k], starts[k + 1]) for k in members])
            index[rows], sizes[value] = np.arange(len(rows)), len(rows)
        first, *others = sets
        for other in others:
            _agree(self.files[sets[first][0]], self.files[sets[other][0]], "samples", sizes[first],
                   sizes[other])
        return index

    def _tested(self, facts):
        """The facts with what the files do not say of boundary and shifts, by tests on the data."""
        said = "by the data"
        self.facts = facts
        if "" in facts.boundary:
            jumps = seam(self.files[0])
            facts = replace(facts, boundary=tuple(
                kind or ("periodic" if jump < SEAM else "closed")
                for kind, jump in zip(facts.boundary, jumps, strict=True)))
            shown = ", ".join(f"{axis} {kind} (jump across the ends {jump:.2f} times those inside)"
                              for axis, kind, jump in zip(facts.axes, facts.boundary, jumps,
                                                          strict=True))
            _say(f"{facts.name}: the file does not say its boundary; {said}: {shown}. If that is "
                 "wrong, say boundary in the file or in --facts.")
        if facts.shifts is None:
            circles = [axis for axis, circle in zip(facts.axes, facts.periodic, strict=True)
                       if circle]
            free = shiftable(self, circles) if circles and not facts.steady else ()
            facts = replace(facts, shifts=free)
        return facts

    @cached_property
    def look(self):
        """What is measured of some trajectories, for tests of facts."""
        return Look(self)

    def __len__(self):
        return len(self.row)

    def read(self, indices, frames=slice(None)):
        """Float32 (n, T, C, *grid) of trajectories in any order; `frames` takes part of them."""
        return self._read(indices, self.frames[frames], "read", len(self.facts.channels))

    def inputs(self, indices, frames=slice(None)):
        """The given channels (n, T, E, *grid), T = 1 where they do not vary; None without any."""
        if not self.facts.inputs:
            return None
        frames = self.frames[frames] if self.facts.inputs_vary else range(1)
        return self._read(indices, frames, "read_inputs", len(self.facts.inputs))

    def _read(self, indices, frames, how, channels):
        indices = np.asarray(indices, dtype=np.int64)
        out = np.empty((len(indices), len(frames), channels, *self.facts.grid), np.float32)
        keys = np.stack([self.owner[indices], self.part[indices]])
        for k, part in np.unique(keys, axis=1).T if len(indices) else ():
            chosen = np.flatnonzero((keys[0] == k) & (keys[1] == part))
            file, move = self.files[k], part * (len(self.frames) - 1) * self.frames.step
            moved = range(frames.start + move, frames.stop + move, frames.step)
            rows = self.row[indices[chosen]]
            u = getattr(file, how)(rows, moved, self.stride_x)
            finite = np.isfinite(u).reshape(len(u), -1)
            if not finite.all():
                bad = int(np.argmin(finite.all(1)))
                raise NotFinite(file.path, rows[bad], 1 - finite[bad].mean())
            out[chosen] = u
        return torch.from_numpy(out)

    def stream(self, indices, megabytes=32):
        """Yield all frames of these trajectories as u (B, C, *grid) of bounded size."""
        for rows, frames in self._pieces(indices, len(self.facts.channels), megabytes):
            yield self.read(indices[rows], frames).flatten(0, 1)

    def stream_inputs(self, indices, megabytes=32):
        """Yield the given channels likewise, (B, E, *grid)."""
        frames = len(self.frames) if self.facts.inputs_vary else 1
        for rows, part in self._pieces(indices, len(self.facts.inputs), megabytes, frames):
            yield self.inputs(indices[rows], part).flatten(0, 1)

    def _pieces(self, indices, channels, megabytes, frames=None):
        size = 4 * channels * math.prod(self.facts.grid)
        return pieces(len(indices), frames or len(self.frames), size, int(megabytes * 2**20))

    def params(self, indices):
        """Float64 (n, P): raw parameter values in the order of `facts.params`."""
        indices = np.asarray(indices, dtype=np.int64)
        rows = np.zeros((len(indices), len(self.files[0].facts.params)))
        for k in np.unique(self.owner[indices]):
            chosen = self.owner[indices] == k
            rows[chosen] = self.files[k].params[self.row[indices[chosen]]]
        return torch.from_numpy(rows)

    def split(self, name):
        """Int64 indices of the trajectories of a split, in ascending order of samples."""
        if name not in SPLITS:
            raise UsageError(f"there is no split {name}; there are {', '.join(SPLITS)}.")
        if self.all_test:
            return torch.arange(len(self) if name == "test" else 0)
        chosen = np.flatnonzero(self._parts == SPLITS.index(name))
        return torch.from_numpy(chosen[np.argsort(self.sample[chosen], kind="stable")])

    @cached_property
    def _parts(self):
        """For each trajectory the number of its split; -1 in a gap."""
        if self.in_time:
            return _cut_in_time(CUTS)[self.part]
        if any(file.split for file in self.files):
            return self._as_folders_say()
        n, published = int(self.sample.max()) + 1, self.files[0].test
        test, held = max(1, n // 10), max(1, n // 20)
        part = np.zeros(n, np.int64)
        if published:
            part[:test] = 3
            rest = np.random.RandomState(0).permutation(n - test) + test
            if published == "last":
                part, rest = part[::-1].copy(), rest - test
        else:
            order = np.random.RandomState(0).permutation(n)
            part[order[:test]], rest = 3, order[test:]
        cut = len(rest) - 2 * held
        part[rest[cut:cut + held]], part[rest[cut + held:]] = 1, 2
        return part[self.sample]

    def _as_folders_say(self):
        said = np.array([{"train": 0, "val": 2, "test": 3}[file.split] for file in self.files])
        part = said[self.owner]
        for name, number, share in (("val", 2, 20), ("test", 3, 10), ("fit", 1, 20)):
            if (part == number).any():
                continue
            if name != "fit":
                _say(f"{self.files[0].facts.name}: there is no {name} folder; a part of train "
                     "takes its place.")
            samples = np.unique(self.sample[part == 0])
            if len(samples) < 2:
                raise UsageError(f"{self.files[0].path}: the train folder has too few "
                                 f"trajectories to cut {name} from it.")
            order = np.random.RandomState(0).permutation(samples)
            part[np.isin(self.sample, order[: max(1, len(samples) // share)])] = number
        return part

    @property
    def about(self):
        """What is true of the data, plain: all that is needed to use a model without them."""
        return self.facts.plain()

    @cached_property
    def digest(self):
        """Sha256 of layout, facts, size and 64 fixed frames (thinned); never a whole read."""
        digest = hashlib.sha256()
        for file in self.files:
            about = replace(file.facts, name="", equation="").plain()
            digest.update(repr((about, file.samples, file.split, file.params.tolist(),
                                file.times.tolist())).encode())
        starts = np.cumsum([0] + [file.samples for file in self.files])
        for i in range(64):
            index, last = i * (int(starts[-1]) - 1) // 63, self.files[0].facts.frames - 1
            k = int(np.searchsorted(starts, index, side="right")) - 1
            file, row = self.files[k], [index - starts[k]]
            frame = i * last // 63 if last > 1 else last  # steady: the solution
            grid = file.facts.grid
            thin = 1 if len(grid) == 1 else max(1, min(grid) // 16)
            digest.update(file.read(row, range(frame, frame + 1), thin))
            if file.facts.inputs:
                digest.update(file.read_inputs(row, range(frame, frame + 1), thin))
        return digest.hexdigest()


class NotFinite(UsageError):
    """A sample holds NaN or Inf."""

    def __init__(self, path, row, share):
        super().__init__(
            f"{path}: NaN or Inf in sample {row}, {100 * share:.3g} % of its values; "
            f"`python -m ups.data validate` names all. Mend the file; where it is always the same "
            "points, fill them and add a channel that marks them to `inputs`.")


def _cut_in_time(count):
    """The split of each of `count` pieces in a row, with a piece between two parts left out."""
    test, held = max(1, count // 10), max(1, count // 20)
    sizes = [count - test - 2 * held - 3, held, held, test]
    parts = []
    for number, size in enumerate(sizes):
        parts += [number] * size + [-1] * (number < 3)
    return np.array(parts)


def _in_order(files):
    """By parameters, then by name."""
    return sorted(files, key=lambda file: (
        tuple(file.params[0]) if file.family and len(file.params) else (), natural(file.path)))


def _agree(a, b, what, left, right):
    if left != right:
        raise UsageError(f"{a.path} and {b.path} differ in {what} ({left} and {right}) and cannot "
                         "be one data set; choose by --data FILE, or name:key=value in --tasks.")


def _divisors(n):
    return ", ".join(str(k) for k in range(1, min(n, 65)) if n % k == 0)


def _say(sentence):
    print(sentence, file=sys.stderr)
