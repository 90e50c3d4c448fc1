"""Stream trajectories through a codec, in batches that depend on nothing but their shapes.

The codec's error is the nRMSE of decode(z) with z as it is stored: the mean over frames and
channels of |p - u| / |u|, norms over space; a channel that is zero in a whole frame is left out.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from ups.relative_error import relative_error


@torch.no_grad()
def encode(codec, batches, shape, dtype, device):
    """Latents (n, T, N, D) of the stream of u (B, C, *grid), on the CPU, and the error (n,)."""
    z = torch.empty(shape, dtype=dtype)  # on the CPU: no other tensor can be saved
    rows, errors = z.flatten(0, 1), []
    for u in _ahead(batches):
        now, rows = rows[:len(u)], rows[len(u):]
        u = u.to(device)
        now.copy_(codec.encode(u))
        errors.append(relative_error(codec.decode(now.to(device, u.dtype)), u).cpu())
    errors = torch.cat(errors).view(len(z), -1)  # (n, T * C)
    return z, errors.nansum(1) / (~errors.isnan()).sum(1).clamp(min=1)


def _ahead(items):
    """Yield the items of an iterator; the next one is made in a thread while one is used."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, items, None)
        while (item := waiting.result()) is not None:
            waiting = pool.submit(next, items, None)
            yield item
