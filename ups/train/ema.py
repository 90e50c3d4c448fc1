"""Exponential moving average of the weights, and the best of them by validation score.

    shadow <- d shadow + (1 - d) weights,     d = min(decay, (1 + k) / (10 + k)) at step k

The shadows are clones of the parameters as they are: whole under DDP, shards (DTensor) under FSDP2.
Each rank works on its own shards: every operation is element by element.
"""

import contextlib
import math

import torch

from ups.train.optim import OPTIONS
from ups.train.step import compile_in_graph


def local(tensors):
    """This rank's part of each tensor, in the same memory."""
    return [t.detach().to_local() if hasattr(t, "to_local") else t.detach() for t in tensors]


@compile_in_graph(options=OPTIONS)
def blend(shadow, params, share):
    change = torch._foreach_sub(params, shadow)
    torch._foreach_mul_(change, share)
    torch._foreach_add_(shadow, change)


class EMA:
    def __init__(self, model, decay):
        self.decay, self.best_score = decay, float("inf")
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.best = [s.clone() for s in self.shadow]
        # updates so far, on the device, so that a CUDA graph counts them too
        self.updates = torch.zeros((), dtype=torch.float64, device=local(self.shadow)[0].device)

    @torch.no_grad()
    def update(self, model):
        shadow, params = local(self.shadow), local(model.parameters())
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        self.updates += 1
        blend(shadow, params, (1 - decay).to(shadow[0].dtype))

    @torch.no_grad()
    def keep_best(self, score):
        """Keep a copy of the average if `score` is below every earlier one."""
        if score < self.best_score:
            self.best_score = score
            torch._foreach_copy_(local(self.best), local(self.shadow))

    @contextlib.contextmanager
    def applied(self, model, best=False):
        """Lend the averaged weights to `model`; its own come back, in the same memory.

        The best ones are the last ones where no score was ever finite.
        """
        best = best and math.isfinite(self.best_score)
        params = local(model.parameters())
        own = [p.clone() for p in params]
        with torch.no_grad():
            torch._foreach_copy_(params, local(self.best if best else self.shadow))
        reshard(model)
        try:
            yield model
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, own)
            reshard(model)


def reshard(model):
    """Let FSDP2 forget what it has gathered, which it would use instead of new shards."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
