"""Exponential moving average of the weights, and the best of them by validation score.

    shadow <- d shadow + (1 - d) weights,     d = min(decay, (1 + k) / (10 + k)) at step k

The shadows are clones of the parameters as they are: whole under DDP, shards (DTensor) under FSDP2.
Each rank works on its own shards: every operation is element by element.
"""

import contextlib

import torch
from torch.distributed.tensor import DTensor


def local(tensors):
    """This rank's part of each tensor, in the same memory."""
    return [t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.updates = 0
        self.best_score = float("inf")
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.best = [s.clone() for s in self.shadow]

    @torch.no_grad()
    def update(self, model):
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(local(self.shadow), local(model.parameters()), 1 - decay)

    @torch.no_grad()
    def keep_best(self, score):
        """Keep a copy of the average if `score` is below every earlier one."""
        if score < self.best_score:
            self.best_score = score
            torch._foreach_copy_(local(self.best), local(self.shadow))

    @contextlib.contextmanager
    def applied(self, model, best=False):
        """Lend the averaged weights to `model`; its own come back, in the same memory."""
        params = local(model.parameters())
        own = [p.clone() for p in params]
        with torch.no_grad():
            torch._foreach_copy_(params, local(self.best if best else self.shadow))
        try:
            yield model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, own)
