"""The same seconds of training for every model: steps are timed first, their number follows.

Neither compilation nor validation costs a model a step.
"""

MOMENTS, VAL = 8, 32  # validations during a training, trajectories of each
WARMUP = 0.02         # share of the steps
TIMED = 10            # chunks of steps that are timed; the fastest counts


def chunk_steps(cuda):
    """Steps that are timed together."""
    return 20 if cuda else 1


def step_seconds(marks):
    """Seconds of a step: the least of what `marks`, (step, time), enclose.

    What else the machine does only adds to it; the first mark comes before compilation.
    """
    return min((end - begin) / (last - first)
               for (first, begin), (last, end) in zip(marks, marks[1:], strict=False))


def steps_within(seconds, step):
    """How many steps of `step` seconds take `seconds`."""
    return max(8, round(seconds / step))
