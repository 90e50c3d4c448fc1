"""Random numbers that are a function of (seed, step, row, use) alone, on one kind of device.

    batch["noise"] = noise.normal(batch, cfg, *z.shape[1:], use="noise")

They are drawn for the whole global batch and taken at this rank's rows, so that neither a resume
nor another number of processes changes one of them. `use` names what they are for: numbers of two
uses are independent.
"""

import hashlib

import torch


def generator(device, *key):
    """A generator that belongs to a key, such as (seed, step, use)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7]))  # CPU: 32 bits count


def normal(batch, cfg, *shape, use):
    """Standard normal numbers (B, *shape) for this rank's rows of the step's global batch."""
    return _rows(torch.randn, batch, cfg, shape, use)


def uniform(batch, cfg, *shape, use):
    """Numbers in [0, 1) of shape (B, *shape), drawn in the same way."""
    return _rows(torch.rand, batch, cfg, shape, use)


def disturb(batch, cfg, seen=1):
    """Add the numbers of a step's shift, mirror and sum, and noise for the `seen` given frames."""
    if cfg.augment:
        batch["move"] = uniform(batch, cfg, 10, use="augment")
    if cfg.noise:
        batch["level"] = cfg.noise * uniform(batch, cfg, use="level")
        batch["noise"] = normal(batch, cfg, *batch["z"][0, :seen].squeeze(0).shape, use="noise")
    return batch


def _rows(draw, batch, cfg, shape, use):
    device = batch["rows"].device
    source = generator(device, cfg.seed, batch["step"], use)
    return draw(cfg.batch_size, *shape, device=device, generator=source)[batch["rows"]]
