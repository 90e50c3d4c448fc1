"""Errors in physical units, and the definitions that are printed and stored beside them."""

import torch

NRMSE = ("nRMSE = |p - y|_2 / |y|_2 over space, for each trajectory, channel and predicted frame, "
         "then the mean over all of them (a channel that is zero everywhere is left out); physical "
         "units; the given first frame is not counted")


DRIFT = ("conservation drift = |mean of p - mean of the first frame| / rms of the first frame, "
         "over space, for the channels that the equation conserves, mean over trajectories and "
         "frames")


def drift(p, u0, channels):
    """How far conserved means have moved (B, T) in p (B, T, C, *grid) since u0 (B, C, *grid).

    Zero where the task conserves nothing, so that tasks may be mixed.
    """
    if not channels:
        return p.new_zeros(p.shape[:2])
    p, u0 = p[:, :, channels].flatten(3), u0[:, None, channels].flatten(3)
    moved = (p.mean(3) - u0.mean(3)).abs()
    return (moved / u0.square().mean(3).sqrt().clamp(min=1e-6)).mean(2)


def nrmse(p, y):
    """Relative errors (B, T), float64, of fields (B, T, C, *grid): the mean over channels."""
    p, y = p.double().flatten(3), y.double().flatten(3)  # (B, T, C, points)
    norm = y.norm(dim=3)
    error = (p - y).norm(dim=3) / torch.where(norm > 0, norm, 1.0)
    return (error * (norm > 0)).sum(2) / (norm > 0).sum(2).clamp(min=1)
