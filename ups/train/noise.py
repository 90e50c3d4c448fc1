"""Random numbers that are a function of (seed, step, row) alone, on one kind of device.

They are drawn for the whole global batch and taken at this rank's rows, so that neither a resume
nor another number of processes changes one of them.
"""

import torch


def generator(device, seed, step, stream=0):
    """A generator for one use (`stream`) in one step."""
    mixed = ((seed * 1_000_003 + step) * 64 + stream) % 2**63
    return torch.Generator(device).manual_seed(mixed)


def normal(batch, cfg, shape, stream=0):
    """Standard normal numbers (B, *shape) for this rank's rows of the step's global batch."""
    return _rows(torch.randn, batch, cfg, shape, stream)


def uniform(batch, cfg, shape, stream=0):
    """Numbers in [0, 1) of shape (B, *shape), drawn in the same way."""
    return _rows(torch.rand, batch, cfg, shape, stream)


def _rows(draw, batch, cfg, shape, stream):
    device = batch["rows"].device
    source = generator(device, cfg.seed, batch["step"], stream)
    return draw(cfg.batch_size, *shape, device=device, generator=source)[batch["rows"]]
