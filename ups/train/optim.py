"""AdamW and Muon with a learning rate that CUDA graphs follow, and its course over the steps.

Muon (Jordan et al. 2024): the momentum of a matrix of weights, made orthogonal, is its update.

    M <- m M + (1 - m) G        G' = m M + (1 - m) G = U S V^T        W <- W - lr scale U V^T

Every direction of the update has the same size, so that rare directions of the gradient are learned
as fast as the dominant ones. U V^T comes from five Newton-Schulz steps on G' / |G'|: odd
polynomials that send all singular values near one, in matrix products alone. `scale` gives entries
a root mean square of `rms`, so that one learning rate serves both this and AdamW, which takes all
other weights: biases, the mixers' taps, embeddings, the first and the last layer.
"""

import torch
import torch.nn.functional as F

from ups.train.step import compile_in_graph

# of torch.compile; with this one at its default torch 2.11 fails on some lists of tensors
OPTIONS = {"loop_ordering_after_fusion": False}
A, B, C = 3.4445, -4.7750, 2.0315  # x <- A x + B (x x^T) x + C (x x^T)^2 x


def warmup_then_linear(step, warmup, steps):
    """The share of the learning rate at step 1, 2, ..: up along a line, then down to zero."""
    if step <= warmup:
        return step / warmup
    return max(0.0, (steps + 1 - step) / max(1, steps - warmup))


def set_lr(optimizer, lr):
    """Give all weights the learning rate `lr`; return it."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return lr


class AdamW(torch.optim.AdamW):
    """AdamW with a tensor of a learning rate on the device of the weights, fit for CUDA graphs."""

    def __init__(self, params, lr, **options):
        super().__init__(params, torch.tensor(lr), fused=True, capturable=True, **options)

    def step(self, closure=None):
        for group in self.param_groups:  # the weights have moved since they came here
            group["lr"] = group["lr"].to(group["params"][0].device)
        return super().step(closure)


class Muon(AdamW):
    """AdamW for `model`, but for the matrices of `model.hidden`.

    A model without `hidden` gives every matrix but the first and the last. Updates of matrices have
    a root mean square of `rms` times the learning rate.
    """

    def __init__(self, model, lr, momentum=0.98, rms=0.2, **options):
        self.momentum, self.rms = momentum, rms
        if hidden := getattr(model, "hidden", None):
            matrices = [p for p in hidden.parameters() if p.ndim > 1]
        else:
            matrices = [p for p in model.parameters() if p.ndim > 1][1:-1]
        others = [p for p in model.parameters() if all(p is not q for q in matrices)]
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
        super().__init__([group for group in groups if group["params"]], lr, **options)

    @torch.no_grad()
    def step(self, closure=None):
        """Weights without a gradient, of another task, stand still, and so do their moments."""
        group = self.param_groups[0]
        params = [p for p in group["params"] if p.grad is not None] if group["muon"] else []
        grads = [p.grad for p in params]
        for p in params:
            p.grad = None  # AdamW leaves these alone
        super().step()
        if not params:
            return
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
            if "momentum" not in self.state[p]:  # AdamW expects a step in every state
                self.state[p] |= {"step": torch.zeros(()), "momentum": torch.zeros_like(p)}
        means = [self.state[p]["momentum"] for p in params]
        rotate(params, grads, means, self.momentum, self.rms, group["lr"], group["weight_decay"])


@compile_in_graph(options=OPTIONS)
def rotate(params, grads, means, momentum, rms, lr, weight_decay):
    """One step of the matrices `params`, and of the `means` of their gradients, in place."""
    torch._foreach_lerp_(means, grads, 1 - momentum)
    updates = orthogonal(torch._foreach_lerp(grads, means, momentum))
    torch._foreach_mul_(updates, rms * lr)
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_sub_(params, updates)


def orthogonal(tensors, padded=None):
    """U V^T of every matrix, scaled to a root mean square of about one.

    Matrices of one shape go through the products together. `padded` with zeros, so do all of one
    height (or of up to 128 rows), those up to twice as wide and the wider ones; that is the default
    on a GPU, where launches cost and arithmetic does not.

    A tensor (i, .., j, r, c) of four axes or more is i * .. * j matrices, unless r and c are the
    sides of a convolution's kernel; all others have rows x rest.
    """
    stacks, out = {}, list(tensors)
    for i, tensor in enumerate(tensors):
        x = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # of FSDP2
        many = x.ndim > 3 and min(x.shape[-2:]) > 7
        x = x.flatten(0, -3) if many else x.flatten(1)[None]
        flipped = x.shape[1] > x.shape[2]
        x = x.mT if flipped else x  # (n, r, c) with r <= c
        rows, columns = x.shape[1:]
        loose = x.is_cuda if padded is None else padded
        kind = (max(rows, 128), columns > 2 * rows) if loose else (rows, columns)
        stacks.setdefault(kind, []).append((i, flipped, x))
    for members in stacks.values():
        sizes = [len(x) for _, _, x in members]
        height, width = (max(x.shape[axis] for _, _, x in members) for axis in (1, 2))
        x = torch.cat([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1]))
                       for _, _, x in members])
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-20)
        x = x.bfloat16() if x.is_cuda else x  # the values near one are only roughly there anyway
        for _ in range(5):
            y = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(y, y, y, beta=B, alpha=C), x, beta=A)
        for (i, flipped, like), new in zip(members, x.split(sizes), strict=True):
            rows, columns = like.shape[1:]
            new = columns**0.5 * new[:, :rows, :columns].to(like.dtype)
            new = (new.mT if flipped else new).contiguous().view(tensors[i].shape)
            if hasattr(like := tensors[i], "full_tensor"):  # every rank has computed all of it
                from torch.distributed.tensor import distribute_tensor  # takes a second to load

                new = distribute_tensor(new, like.device_mesh, like.placements, src_data_rank=None)
            out[i] = new
    return out
