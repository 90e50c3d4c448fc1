"""The learning rate: a linear warm-up to one, then a cosine to zero at the last step."""

import math


def warmup_cosine(warmup, steps):
    """The factor of the learning rate as a function of the step k = 0, 1, ..."""
    def factor(k):
        if k < warmup:
            return (k + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (k - warmup) / max(1, steps - warmup)))

    return factor
