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
from ups.data.check import SEAM, Look, shiftable
from ups.data.facts import scale_of
from ups.data.file import agree, natural, pieces

SPLITS = ("train", "fit", "val", "test")
CUTS = 40  # pieces in time of a long trajectory that is split for itself


class Fields:
    """Lazy view of the files of one data set; holds no handle, so any process may use it."""

    def __init__(self, files, stride_x=1, stride_t=1, first_frame=None, all_test=False):
        self.files = sorted(files, key=lambda file: (
            file.params[:1].tolist() if file.family else [], natural(file.path)))
        self.stride_x, self.all_test = stride_x, all_test
        facts, where = self.files[0].facts, self.files[0].path
        agree(self.files)
        if wrong := [n for n in facts.grid if n % stride_x]:
            fit = [str(k) for k in range(1, 65) if not wrong[0] % k]
            raise UsageError(f"--stride_x {stride_x} does not divide the {wrong[0]} points of "
                             f"{where}; {', '.join(fit)} do.")
        first = facts.first_frame if first_frame is None else first_frame
        first, stride_t = (0, 1) if facts.steady else (first, stride_t)  # no time series
        self.frames = range(first, min(file.facts.frames for file in self.files), stride_t)
        if len(self.frames) < 2:
            raise UsageError(f"{where}: its frames, {self.frames.stop} in all, are fewer than two "
                             f"from first_frame {first} on with --stride_t {stride_t}; use longer "
                             "data, or smaller numbers.")
        self._lay_out()
        self.facts = replace(
            facts, grid=tuple(n // stride_x for n in facts.grid), frames=len(self.frames),
            dt=facts.dt * stride_t, first_frame=first,
            scales=tuple(map(scale_of, self.params(
                self.split("test" if all_test else "train")).unbind(1))))
        self._test_facts()

    def _lay_out(self):
        """The trajectories: file, row, piece in time, sample; those of one sample stay together."""
        first, step, count = self.frames.start, self.frames.step, len(self.frames)
        starts, sizes = [], {}  # of a family, files of other parameters lie side by side
        for file in self.files:
            key = tuple(file.params[0].tolist()) if file.family else ()
            starts.append(sizes.get(key, 0))
            sizes[key] = starts[-1] + file.samples
        if len({*sizes.values()}) > 1:
            raise UsageError(f"{self.files[0].path.parent}: files of other parameters differ in "
                             f"samples {sorted(sizes.values())}; choose by --data FILE.")
        samples = max(sizes.values())
        self.in_time = samples < 4 and not self.all_test and not any(f.split for f in self.files)
        if self.in_time and count <= CUTS:
            raise UsageError(
                f"{self.files[0].path}: {samples} trajector{'y' if samples == 1 else 'ies'} of "
                f"{count} frames cannot be split into train, fit, val and test; give four "
                f"trajectories, along an axis called sample, or more than {CUTS} frames.")
        count = (count - 1) // CUTS + 1 if self.in_time else count
        self.frames = self.frames[:count]
        self.owner, self.row, self.part, self.sample = np.array([
            (k, row, part, starts[k] + row) for k, file in enumerate(self.files)
            for length in [len(range(first, file.facts.frames, step))]
            for row in range(file.samples)
            for part in range(CUTS if self.in_time else max(1, (length - 1) // (count - 1)))]).T

    def _test_facts(self):
        """What the files do not say of boundary and shifts, by tests on the data."""
        facts = self.facts
        if "" in facts.boundary:
            jumps = self.look.seams
            for axis, kind, jump in zip(facts.axes, facts.boundary, jumps, strict=True):
                if not kind and jump == math.inf:
                    raise UsageError(f"{self.files[0].path}: both ends of {axis} are always equal; "
                                     "leave the last point out if it repeats the first, or say "
                                     "boundary in the file or in --facts.")
            boundary = tuple(kind or ("periodic" if jump < SEAM else "closed")
                             for kind, jump in zip(facts.boundary, jumps, strict=True))
            self.facts = facts = replace(facts, boundary=boundary)
            shown = ", ".join(f"{axis} {kind} (jump across the ends {jump:.2f} times those inside)"
                              for axis, kind, jump in zip(facts.axes, boundary, jumps, strict=True))
            print(f"{facts.name}: the file does not say its boundary; by the data: {shown}. If "
                  "that is wrong, say boundary in the file or in --facts.", file=sys.stderr)
        if facts.shifts is None:
            free = [axis for axis, circle in zip(facts.axes, facts.periodic, strict=True)
                    if circle and not facts.steady]
            self.facts = replace(facts, shifts=shiftable(self, free) if free else ())

    @cached_property
    def look(self):
        """What is measured of some trajectories, for tests of facts."""
        return Look(self)

    def __len__(self):
        return len(self.row)

    def inputs(self, indices, frames=slice(None)):
        """The given channels, as `read` has them; None without any."""
        return self.read(indices, frames, inputs=True) if self.facts.inputs else None

    def read(self, indices, frames=slice(None), inputs=False):
        """Float32 (n, T, C, *grid) of trajectories in any order; `frames` takes part of them.

        Or their inputs (n, T, E, *grid), T = 1 where they do not vary.
        """
        channels = self.facts.inputs if inputs else self.facts.channels
        frames = range(1) if inputs and not self.facts.inputs_vary else self.frames[frames]
        indices = np.asarray(indices, dtype=np.int64)
        out = np.empty((len(indices), len(frames), len(channels), *self.facts.grid), np.float32)
        keys = np.stack([self.owner[indices], self.part[indices]])
        for k, part in np.unique(keys, axis=1).T if len(indices) else ():
            chosen = np.flatnonzero((keys[0] == k) & (keys[1] == part))
            file, move = self.files[k], part * (len(self.frames) - 1) * self.frames.step
            moved = range(frames.start + move, frames.stop + move, frames.step)
            rows = self.row[indices[chosen]]
            u = file.read(rows, moved, self.stride_x, channels)
            finite = np.isfinite(u).reshape(len(u), -1).mean(1)
            if finite.min() < 1:
                bad = int(np.argmin(finite))
                raise UsageError(f"{file.path}: NaN or Inf in sample {rows[bad]}, "
                                 f"{100 - 100 * finite[bad]:.3g} % of its values; leave it out, or "
                                 "fill them and add a channel that marks them to `inputs` (`python "
                                 "-m ups.data validate` names all).")
            out[chosen] = u
        return torch.from_numpy(out)

    def stream(self, indices, megabytes=32, inputs=False):
        """Yield what `read` gives of these trajectories as u (B, C, *grid) of bounded size."""
        facts = self.facts
        size = 4 * len(facts.inputs if inputs else facts.channels) * math.prod(facts.grid)
        frames = 1 if inputs and not facts.inputs_vary else facts.frames
        for rows, span in pieces(len(indices), frames, size, int(megabytes * 2**20)):
            yield self.read(indices[rows], span, inputs).flatten(0, 1)

    def params(self, indices):
        """Float64 (n, P): raw parameter values in the order of `facts.params`."""
        indices = np.asarray(indices, dtype=np.int64)
        first = np.cumsum([0, *(file.samples for file in self.files)])
        values = np.concatenate([file.params for file in self.files])
        return torch.from_numpy(values[first[self.owner[indices]] + self.row[indices]])

    def split(self, name):
        """Int64 indices of the trajectories of a split, in ascending order of samples."""
        if self.all_test:
            return torch.arange(len(self) if name == "test" else 0)
        chosen = np.flatnonzero(self._parts == SPLITS.index(name))
        return torch.from_numpy(chosen[np.argsort(self.sample[chosen], kind="stable")])

    @cached_property
    def _parts(self):
        """For each trajectory the number of its split; -1 in a gap."""
        if self.in_time:  # with a piece between two parts left out
            test, held = max(1, CUTS // 10), max(1, CUTS // 20)
            sizes = (CUTS - test - 2 * held - 3, 1, held, 1, held, 1, test)
            return np.repeat([0, -1, 1, -1, 2, -1, 3], sizes)[self.part]
        said = {"": 0, "train": 0, "val": 2, "test": 3}
        part = np.array([said[file.split] for file in self.files])[self.owner]
        pool, random = np.unique(self.sample[part == 0]), np.random.RandomState(0)
        n = len(pool)
        test, held = max(1, n // 10), max(1, n // 20)
        if (published := self.files[0].test) == "first":
            order = np.append(np.arange(test), test + random.permutation(n - test))
        elif published == "last":
            order = np.append(np.arange(n - test, n), random.permutation(n - test))
        else:
            order = random.permutation(n)
        for number, chosen in ((3, order[:test]), (1, order[-2 * held:-held]), (2, order[-held:])):
            if (part == number).any():
                continue
            if any(file.split for file in self.files) and number > 1:
                print(f"{self.files[0].facts.name}: there is no {SPLITS[number]} folder; a part of "
                      "train takes its place.", file=sys.stderr)
            part[np.isin(self.sample, pool[chosen])] = number
        if n < 2 or not (part == 0).any():
            raise UsageError(f"{self.files[0].path}: the train folder has too few trajectories to "
                             "cut other splits from it.")
        return part

    @cached_property
    def digest(self):
        """Sha256 of facts, size and some 64 fixed frames (thinned); never a whole read."""
        digest, count = hashlib.sha256(), max(2, -(-64 // len(self.files)))
        for file in self.files:
            grid, last = file.facts.grid, file.facts.frames - 1
            about = replace(file.facts, name="", equation="").plain()
            digest.update(repr((about, file.samples, file.split, file.params.tolist(),
                                file.times.tolist())).encode())
            thin = 1 if len(grid) == 1 else max(1, min(grid) // 16)
            for i in range(count):
                frame = i * last // (count - 1) if last > 1 else last  # steady: the solution
                row, span = [i * (file.samples - 1) // (count - 1)], range(frame, frame + 1)
                digest.update(file.read(row, span, thin))
                if file.facts.inputs:
                    digest.update(file.read_inputs(row, span, thin))
        return digest.hexdigest()
