"""The relative error |p - y| / |y|, as losses, codecs, caches and reports take it: defined once."""

import torch


def relative_error(p, y, space=2):
    """|p - y| / |y| over the axes from `space` on: of fields (B, C, *grid) it is (B, C).

    NaN where y is zero: there it means nothing. Infinite where p or y is not finite, since a mean
    must not leave that out.
    """
    norm, error = (x.flatten(space).norm(dim=space) for x in (y, p - y))
    error = error / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    return torch.where(norm == 0, torch.nan, error.nan_to_num(torch.inf, torch.inf))


def mean_relative_error(p, y, space=2):
    """Its mean over the last axis before space, the channels, without those that are zero."""
    error = relative_error(p, y, space)
    there = ~error.isnan()
    return torch.where(there, error, 0.0).sum(-1) / there.sum(-1).clamp(min=1)
