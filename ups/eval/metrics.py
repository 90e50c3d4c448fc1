"""Errors in physical units, and the definitions that are printed and stored beside them."""

import torch

NRMSE = ("nRMSE = |p - y|_2 / |y|_2 over space, for each trajectory, channel and predicted frame, "
         "then the mean over all of them (a channel that is zero everywhere is left out); physical "
         "units; the given first frame is not counted")


def nrmse(p, y):
    """Relative errors (B, T), float64, of fields (B, T, C, *grid): the mean over channels."""
    p, y = p.double().flatten(3), y.double().flatten(3)  # (B, T, C, points)
    norm = y.norm(dim=3)
    error = (p - y).norm(dim=3) / torch.where(norm > 0, norm, 1.0)
    return (error * (norm > 0)).sum(2) / (norm > 0).sum(2).clamp(min=1)
