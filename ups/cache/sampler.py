"""Batch k is a pure function of (seed, k): a run resumes with `start = k`, on any number of ranks.

Every batch is of one task. A random order of the tasks is repeated for ever, so that as many
consecutive steps as there are tasks hold each of them once. The j-th batch of a task takes places
j * B to (j + 1) * B - 1 of its endless list, permutation after permutation of its windows: none
comes again before all have been seen.
"""

import torch

from ups.train.noise import generator


class StepSampler:
    """A loader's `batch_sampler`: step k gives the global batch [(k, row, (task, window)), ...]."""

    drop_last = True

    def __init__(self, sizes, batch_size, steps, seed, start=0):
        self.sizes, self.batch_size, self.steps = list(sizes), batch_size, steps
        self.seed, self.start = seed, start
        self.rounds = [{} for _ in sizes]  # per task, the permutations in use
        self.order = _permutation(len(sizes), seed).tolist()

    def __len__(self):
        return max(0, self.steps - self.start)

    def __iter__(self):
        return map(self.batch, range(self.start, self.steps))

    def batch(self, step):
        block, place = divmod(step, len(self.order))
        task = self.order[place]
        size, first = self.sizes[task], block * self.batch_size
        known, last = self.rounds[task], first + self.batch_size
        rounds = range(first // size, -(-last // size))  # several where the windows are used up
        self.rounds[task] = {r: known[r] if r in known else _permutation(size, self.seed, task, r)
                             for r in rounds}
        windows = torch.cat([order[max(0, first - r * size) : last - r * size]
                             for r, order in self.rounds[task].items()])
        return [(step, row, (task, window)) for row, window in enumerate(windows.tolist())]


def _permutation(size, *seed):
    return torch.randperm(size, generator=generator("cpu", *seed))
