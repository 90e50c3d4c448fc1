"""Errors in physical units, and the definitions that are printed and stored beside them."""

import torch

NRMSE = ("nRMSE = |p - y|_2 / |y|_2 over space, for each trajectory, channel and predicted frame, "
         "then the mean over all of them; physical units; the given first frame is not counted")


def nrmse(p, y):
    """Relative error (B, ...) of fields (B, ..., C, *grid), mean over channels; `y` gives the axes.

    Both are (B, T, C, *grid); the result is (B, T) in float64.
    """
    p, y = p.double().flatten(3), y.double().flatten(3)  # (B, T, C, points)
    tiny = torch.finfo(torch.float32).tiny
    return ((p - y).norm(dim=3) / y.norm(dim=3).clamp_min(tiny)).mean(2)
