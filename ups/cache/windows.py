"""The data set of latent windows: L + 1 consecutive frames of one trajectory.

Frames of a trajectory are neighbours on disk, so a shard (n, T, N, D) seen with row stride N * D is
a matrix of overlapping windows (n * T - L, (L + 1) * N * D): a batch is a choice of its rows, read
in one call and never copied before. L = min(length, T - 1). Window w of a task is number
w % len(starts) of trajectory w // len(starts), and `starts` lists early frames more often.
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

EARLY = 8  # times that a trajectory's first frame is listed


class LatentWindows(Dataset):
    """Windows over one cache per task; D and P are padded with zeros to the widest task."""

    def __init__(self, caches, length):
        self.caches, self.device = list(caches), torch.device("cpu")
        self.lengths = [min(length, cache.shape[1] - 1) for cache in self.caches]
        self.starts = [starts_of(cache.shape[1] - steps)
                       for cache, steps in zip(self.caches, self.lengths, strict=True)]
        self.sizes = [len(cache) * len(starts)
                      for cache, starts in zip(self.caches, self.starts, strict=True)]
        self.width = max(cache.shape[3] for cache in self.caches)
        count = max(cache.params.shape[1] for cache in self.caches)
        self._lay_out([cache.z for cache in self.caches])
        self.conds = [_pad(cache.facts.condition(cache.params), count) for cache in self.caches]
        self.inputs = [torch.cat(list(cache.inputs)) if cache.inputs else None
                       for cache in self.caches]

    def _lay_out(self, latents):
        self.views = [[_windows(z, steps) for z in shards]
                      for shards, steps in zip(latents, self.lengths, strict=True)]

    def __len__(self):
        return sum(self.sizes)

    def move(self, device):
        """Hold all latents on `device`; batches are then gathered there."""
        self.device = torch.device(device)
        self._lay_out([[torch.cat([z.to(device) for z in cache.z])] for cache in self.caches])
        self.conds = [x.to(device) for x in self.conds]
        self.inputs = [x if x is None else x.to(device) for x in self.inputs]

    def __getitems__(self, triples):
        """Triples (step, row, (task, window)) of one global batch, or of a rank's slice of it."""
        steps, rows, pairs = zip(*triples, strict=True)
        tasks, windows = zip(*pairs, strict=True)
        task, windows = tasks[0], torch.tensor(windows)
        starts, cache = self.starts[task], self.caches[task]
        trajectory, start = windows // len(starts), starts[windows % len(starts)]
        z = self._gather(task, trajectory, start)
        trajectory, start, rows = torch.stack([trajectory, start, torch.tensor(rows)]).to(
            self.device, non_blocking=True)
        batch = {} if self.inputs[task] is None else {
            "inputs": self._inputs(task, trajectory, start)}
        return batch | {
            "z": z,
            "dt": torch.full((len(rows),), cache.dt, device=self.device),
            "cond": self.conds[task][trajectory],
            "task": task,
            "step": steps[0],
            "rows": rows,
        }

    def _gather(self, task, trajectory, start):
        """Read windows (B, L + 1, N, D) in the order asked for."""
        views, (_, frames, tokens, width) = self.views[task], self.caches[task].shape
        if len(views) == 1:
            rows = (trajectory * frames + start).to(self.device, non_blocking=True)
            z = views[0].index_select(0, rows)
        else:
            count = len(self.caches[task].z[0])  # trajectories in a shard
            rows = trajectory % count * frames + start
            z = torch.stack([views[shard][row] for shard, row in
                             zip((trajectory // count).tolist(), rows.tolist(), strict=True)])
        return _pad(z.view(len(z), -1, tokens, width).float(), self.width)

    def _inputs(self, task, trajectory, start):
        """Input tokens (B, L, N, E) at the beginning of each step of the windows."""
        given, steps = self.inputs[task], self.lengths[task]
        if given.shape[1] == 1:  # they do not vary in time
            return given[trajectory].expand(-1, steps, -1, -1)
        frames = start[:, None] + torch.arange(steps, device=start.device)
        return given[trajectory[:, None], frames]


def starts_of(count):
    """First frames 0 .. count - 1 of a trajectory's windows, frame f as often as EARLY / (f + 1),
    and at least once: every roll-out begins at frame 0, where solutions are often roughest.
    """
    frames = torch.arange(count)
    times = (EARLY / (frames + 1)).round().long().clamp(min=1)
    return frames.repeat_interleave(times // math.gcd(*times.tolist()))


def whole_batch(batch):
    """The loader's `collate_fn`: `__getitems__` has made the batch already."""
    return batch


def _windows(z, steps):
    """A shard (n, T, N, D) as the matrix of its windows."""
    size = z.shape[2] * z.shape[3]
    return z.as_strided((len(z) * z.shape[1] - steps, (steps + 1) * size), (size, 1))


def _pad(x, width):
    """Append zeros to the last axis."""
    return F.pad(x, (0, width - x.shape[-1]))
