"""UPS: a staged latent simulator for partial differential equations.

Vocabulary, the same in every file:

    u       field                 (B, C, *grid), one to three space axes
    z       latent tokens         (B, N, D), N = product of the token grid
    z0, z1  latents one time step `dt` apart; `z1_hat` is a prediction of z1
    cond    PDE parameters        (B, P), log10 of their values
    sigma   noise level           (B,)
    run     one folder, runs/NAME, that holds one folder per stage

A batch flows data -> cache -> models; `train` takes the step, `eval` judges the result.
"""

import os

# of torch.compile, which reads it later; torch 2.11 fails on large blocks without it
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")


def __getattr__(name):  # `import ups` alone stays free of torch
    if name == "Simulator":
        from ups.simulator import Simulator

        return Simulator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
