"""The same seconds of training for every model: steps are timed first, their number follows.

Neither compilation nor validation costs a model a step.
"""

MOMENTS, VAL = 8, 32  # validations during a training, trajectories of each
WARMUP = 0.02         # share of the steps


def trial_steps(cuda):
    """Steps that compile, and steps that are timed after them."""
    return (20, 200) if cuda else (2, 10)


def steps_within(seconds, step):
    """How many steps of `step` seconds take `seconds`."""
    return max(8, round(seconds / step))
