"""The data set of latent windows: L + 1 consecutive frames of one trajectory.

Frames of a trajectory are neighbours on disk, so a shard (n, T, N, D) seen with row stride N * D is
a matrix of overlapping windows (n * T - L, (L + 1) * N * D): a batch is a choice of its rows, read
in one call and never copied before. Window w of a task starts at frame w % (T - L) of trajectory
w // (T - L); L = min(length, T - 1); `starts_of` may list early frames more often. Latents that are
few enough may lie on the GPU, all of them: a batch is then gathered there.
"""

import math

import torch
from torch.utils.data import Dataset

EARLY = 8  # times that a trajectory's first frame is listed, see `starts_of`


class LatentWindows(Dataset):
    """Windows over one cache per task; D and P are padded with zeros to the widest task."""

    def __init__(self, caches, length, early=1):
        self.caches, self.early = list(caches), early
        self.lengths = [min(length, cache.shape[1] - 1) for cache in self.caches]
        self.starts = [starts_of(cache.shape[1] - steps, early)
                       for cache, steps in zip(self.caches, self.lengths, strict=True)]
        self.sizes = [len(cache) * len(starts)
                      for cache, starts in zip(self.caches, self.starts, strict=True)]
        width = max(cache.shape[3] for cache in self.caches)
        count = max(cache.params.shape[1] for cache in self.caches)
        self.views = [[_windows(z, steps) for z in cache.z]
                      for cache, steps in zip(self.caches, self.lengths, strict=True)]
        self.device, self.resident = torch.device("cpu"), False
        self.weights = [_pad(cache.weight, width) for cache in self.caches]
        self.conds = [_pad(cache.facts.condition(cache.params), count) for cache in self.caches]
        self.inputs = [_joined(cache.inputs) for cache in self.caches]

    def __reduce__(self):  # a spawned loader worker maps the files itself: no tensor is sent
        return LatentWindows, (self.caches, max(self.lengths), self.early)

    def __len__(self):
        return sum(self.sizes)

    def move(self, device):
        """Hold all latents on `device`, one piece per task."""
        self.device, self.resident = torch.device(device), True
        for task, (cache, steps) in enumerate(zip(self.caches, self.lengths, strict=True)):
            whole = torch.empty(cache.shape, dtype=cache.z[0].dtype, device=device)
            for part, z in zip(whole.split([len(z) for z in cache.z]), cache.z, strict=True):
                part.copy_(z)
            self.views[task] = [_windows(whole, steps)]
        self.weights = [x.to(device) for x in self.weights]
        self.conds = [x.to(device) for x in self.conds]
        self.inputs = [x if x is None else x.to(device) for x in self.inputs]

    def __getitems__(self, triples):
        """Triples (step, row, (task, window)) of one global batch, or of a rank's slice of it."""
        steps, rows, pairs = zip(*triples, strict=True)
        tasks, windows = zip(*pairs, strict=True)
        task, cache, windows = tasks[0], self.caches[tasks[0]], torch.tensor(windows)
        starts = self.starts[task]
        trajectory, start = windows // len(starts), starts[windows % len(starts)]
        where = torch.stack([trajectory, start, torch.tensor(rows)])
        if self.device.type == "cuda":  # one copy, that does not wait for the step before
            where = where.pin_memory().to(self.device, non_blocking=True)
        trajectory, start, rows = where
        batch = {} if self.inputs[task] is None else {
            "inputs": self._inputs(task, trajectory, start)}
        return batch | {
            "z": self._gather(task, trajectory, start),
            "dt": torch.full((len(rows),), cache.dt, device=self.device),
            "cond": self.conds[task][trajectory],
            "channel_weight": self.weights[task],
            "task": task,
            "step": steps[0],
            "rows": rows,
        }

    def _inputs(self, task, trajectory, start):
        """Input tokens (B, L, N, E) at the beginning of each step of the windows."""
        given, steps = self.inputs[task], self.lengths[task]
        if given.shape[1] == 1:  # they do not vary in time
            return given[trajectory].expand(-1, steps, -1, -1)
        frames = start[:, None] + torch.arange(steps, device=start.device)
        return given[trajectory[:, None], frames]

    def _gather(self, task, trajectory, start):
        """Read windows (B, L + 1, N, D) in the order asked for."""
        cache, views = self.caches[task], self.views[task]
        _, frames, tokens, width = cache.shape
        if self.resident:
            rows = trajectory * frames + start
            z = views[0].index_select(0, rows).view(len(rows), -1, tokens, width).float()
            return _pad(z, len(self.weights[task]))
        z = torch.empty(len(start), self.lengths[task] + 1, tokens, len(self.weights[task]))
        plain = z.dtype == cache.z[0].dtype and z.shape[3] == width
        out = z.flatten(1) if plain else None  # else by way of a copy
        count = len(cache.z[0])  # trajectories in a shard
        rows = trajectory % count * frames + start
        if len(views) == 1:
            read = torch.index_select(views[0], 0, rows, out=out)  # on several threads
        else:  # as fast on one thread, which is what a loader worker has
            places = zip((trajectory // count).tolist(), rows.tolist(), strict=True)
            read = torch.stack([views[shard][row] for shard, row in places], out=out)
        if not plain:
            z[..., :width] = read.view(*z.shape[:3], width)
            z[..., width:] = 0
        return z


def starts_of(count, early):
    """First frames 0 .. count - 1 of a trajectory's windows, early ones several times, in
    proportion to early / (f + 1) for frame f, and at least once.

    Every roll-out begins at frame 0, where solutions are often roughest.
    """
    frames = torch.arange(count)
    times = (early / (frames + 1)).round().long().clamp(min=1)
    return frames.repeat_interleave(times // math.gcd(*times.tolist()))


def _windows(z, steps):
    """A shard (n, T, N, D) as the matrix of its windows."""
    size = z.shape[2] * z.shape[3]
    return z.as_strided((len(z) * z.shape[1] - steps, (steps + 1) * size), (size, 1))


def whole_batch(batch):
    """The loader's `collate_fn`: `__getitems__` has made the batch already."""
    return batch


def _joined(shards):
    """One tensor of all shards; None without any. One shard stays as it is mapped."""
    return (shards[0] if len(shards) == 1 else torch.cat(list(shards))) if shards else None


def _pad(x, width):
    """Append zeros to the last axis."""
    return torch.nn.functional.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
