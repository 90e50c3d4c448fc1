"""What the time-dependent solvers share: the march from frame to frame, and a slope limiter.

The number of steps per frame is fixed before the march from a bound on the wave speed, so nothing
in the loop waits for the device. On CUDA one step is captured in a graph and replayed: a step is
some forty small kernels, and launching them one by one would cost more than running them.
"""

import contextlib
import math

import torch

SMALL = 2**18  # numbers in a state


def substeps(t_end, frames, dt_max):
    """Give (steps per frame, dt): the fewest equal steps between two frames with dt <= dt_max."""
    interval = t_end / (frames - 1)
    count = max(1, math.ceil(interval / dt_max * (1 - 1e-9)))
    return count, interval / count


@contextlib.contextmanager
def threads_for(state):
    """Compute with one CPU thread where the state is small.

    Waking a second one for each operation saves little, and on a busy machine costs tenfold.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if state.numel() < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def march(step, state, u0, frames, count, observe=lambda state: state):
    """Apply `step` `count` times per frame from `state`: (B, frames, C, *grid), frame 0 is u0."""
    out = u0.new_empty((u0.shape[0], frames, *u0.shape[1:]))
    out[:, 0] = u0
    if state.is_cuda:
        step, state = graphed(step, state)
    with threads_for(state):
        for frame in range(1, frames):
            for _ in range(count):
                state = step(state)
            out[:, frame] = observe(state)
    return out


def graphed(step, state):
    """Capture `state <- step(state)` on a static copy; the new step replays it in place."""
    with torch.cuda.device(state.device):
        static = state.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # FFT plans and workspaces must exist before the capture
            for _ in range(3):
                step(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.copy_(step(static))

    def replay(_):
        graph.replay()
        return static

    return replay, static


def van_leer(a, b):
    """Limited slope of the one-sided differences a, b: their harmonic mean, 0 at an extremum.

    2 max(ab, 0) / (a + b), written without a branch: torch.where is slow on a CPU.
    """
    total = a + b
    share = (a * b).clamp_(min=0) / total.square().add_(torch.finfo(a.dtype).tiny)
    return share.mul_(total).mul_(2)
