"""The data set of latent windows: H + L frames of one trajectory, `stride` frames apart.

H frames are given and L are to be predicted, at most `length`. Frames of a trajectory are
neighbours on disk, so a shard (n, T, N, D) seen with row stride N * D is a table of overlapping
windows (rows, H + L, N * D): a batch is a choice of its rows, read in one call and never copied
before. A set is the windows of one task and stride, and a batch is of one set. Window w of a set is
number w % len(starts) of trajectory w // len(starts), and `starts` lists early frames more often.
"""

import ctypes
import math
import mmap

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from ups.memory import free_memory

KERNEL = ctypes.CDLL(None)
EARLY = 8  # times that a trajectory's first frame is listed


class LatentWindows(Dataset):
    """Windows over one cache per task; D and P are padded with zeros to the widest task."""

    def __init__(self, caches, length, strides=(1,), history=1):
        self.caches, self.device = list(caches), torch.device("cpu")
        self.history = history
        size = sum(z.nbytes for cache in self.caches for z in cache.z)
        self.from_disk = size > free_memory() / 2  # each time
        self.sets = [(task, stride) for task in range(len(self.caches)) for stride in strides]
        self.starts, self.sizes, self.lengths = [], [], []
        for task, stride in self.sets:
            count, frames = self.caches[task].shape[:2]
            self.lengths.append(min(length, (frames - 1) // stride - history + 1))
            self.starts.append(starts_of(frames - (history - 1 + self.lengths[-1]) * stride))
            self.sizes.append(count * len(self.starts[-1]))
        self.width = max(cache.shape[3] for cache in self.caches)
        count = max(cache.params.shape[1] for cache in self.caches)
        self._lay_out([cache.z for cache in self.caches])
        self.conds = [F.pad(cond, (0, count - cond.shape[1])) for cond in (
            cache.facts.condition(cache.params) for cache in self.caches)]
        self.inputs = [torch.cat(list(cache.inputs)) if cache.inputs else None
                       for cache in self.caches]

    def _lay_out(self, latents):
        self.views = [[_windows(z, self.history - 1 + steps, stride) for z in latents[task]]
                      for (task, stride), steps in zip(self.sets, self.lengths, strict=True)]

    def __len__(self):
        return sum(self.sizes)

    def move(self, device):
        """Hold all latents on `device`; batches are then gathered there."""
        self.device = torch.device(device)
        self._lay_out([[torch.cat([z.to(device) for z in cache.z])] for cache in self.caches])
        self.conds = [x.to(device) for x in self.conds]
        self.inputs = [x if x is None else x.to(device) for x in self.inputs]

    def __getitems__(self, triples):
        """Triples (step, row, (set, window)) of one global batch, or of a rank's slice of it."""
        steps, rows, pairs = zip(*triples, strict=True)
        sets, windows = zip(*pairs, strict=True)
        chosen, windows = sets[0], torch.tensor(windows)
        (task, stride), starts = self.sets[chosen], self.starts[chosen]
        trajectory, start = windows // len(starts), starts[windows % len(starts)]
        z = self._gather(chosen, trajectory, start)
        trajectory, start, rows = torch.stack([trajectory, start, torch.tensor(rows)]).to(
            self.device, non_blocking=True)
        batch = {} if self.inputs[task] is None else {
            "inputs": self._inputs(chosen, trajectory, start)}
        return batch | {
            "z": z,
            "dt": torch.full((len(rows),), stride * self.caches[task].facts.dt, device=self.device),
            "cond": self.conds[task][trajectory],
            "task": task,
            "stride": stride,
            "step": steps[0],
            "rows": rows,
        }

    def _gather(self, chosen, trajectory, start):
        """Read windows (B, H + L, N, D) in the order asked for."""
        views, cache = self.views[chosen], self.caches[self.sets[chosen][0]]
        _, frames, tokens, width = cache.shape
        if len(views) == 1:
            rows = (trajectory * frames + start).to(self.device, non_blocking=True)
            z = views[0].index_select(0, rows)
        else:
            count = len(cache.z[0])  # trajectories in a shard
            rows = trajectory % count * frames + start
            found = [views[shard][row] for shard, row in
                     zip((trajectory // count).tolist(), rows.tolist(), strict=True)]
            if self.from_disk:
                fetch(found)
            z = torch.stack(found)
        return F.pad(z.view(len(z), -1, tokens, width).float(), (0, self.width - width))

    def _inputs(self, chosen, trajectory, start):
        """Input tokens (B, L, N, E) at the beginning of each step of the windows."""
        (task, stride), steps = self.sets[chosen], self.lengths[chosen]
        given = self.inputs[task]
        if given.shape[1] == 1:  # they do not vary in time
            return given[trajectory].expand(-1, steps, -1, -1)
        steps = self.history - 1 + torch.arange(steps, device=start.device)
        frames = start[:, None] + stride * steps
        return given[trajectory[:, None], frames]


def fetch(windows):
    """Let the kernel read windows of mapped files: all at once, and nothing but them. It would else
    read each when it is touched, and megabytes around it."""
    for frames in windows:
        for part in frames.view(-1, frames.shape[-1]):
            begin = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            size = part.data_ptr() + part.nbytes - begin
            KERNEL.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_WILLNEED)


def starts_of(count):
    """First frames 0 .. count - 1 of a trajectory's windows, frame f as often as EARLY / (f + 1),
    and at least once: every roll-out begins at frame 0, where solutions are often roughest.
    """
    frames = torch.arange(count)
    times = (EARLY / (frames + 1)).round().long().clamp(min=1)
    return frames.repeat_interleave(times // math.gcd(*times.tolist()))


def _windows(z, steps, stride):
    """A shard (n, T, N, D) as the table of its windows."""
    size = z.shape[2] * z.shape[3]
    rows = len(z) * z.shape[1] - steps * stride
    if stride == 1:  # contiguous rows are copied a little faster
        return z.as_strided((rows, (steps + 1) * size), (size, 1))
    return z.as_strided((rows, steps + 1, size), (size, stride * size, 1))
