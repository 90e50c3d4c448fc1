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
import sys

# of torch.compile, which reads it later; torch 2.11 fails on large blocks without it
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")

launched = os.environ.keys() & {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}
if launched and sys.platform == "linux":  # do not outlive the launcher, not even while torch loads
    import ctypes
    import signal

    PR_SET_PDEATHSIG = 1  # from linux/prctl.h
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # It has gone already, or is itself the first process of a container.
    if "TORCHELASTIC_RUN_ID" in launched and os.getppid() == 1:
        with open("/proc/1/cmdline") as file:
            if "python" not in file.read():
                sys.exit("error: the launcher has gone; run the same command again.")


def __getattr__(name):  # `import ups` alone stays free of torch
    if name == "Simulator":
        from ups.simulator import Simulator

        return Simulator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
