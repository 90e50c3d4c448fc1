"""The learning rate: a linear warm-up to one, then a cosine to zero at the last step."""

import math


def warmup_cosine(warmup, steps):
    """The factor of the learning rate as a function of the step k = 0, 1, ..."""
    def factor(k):
        if k < warmup:
            return (k + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (k - warmup) / max(1, steps - warmup)))

    return factor


def in_two_acts(warmup, switch, steps):
    """Factors of two groups of weights, one after the other; zero holds the other group."""
    first, second = warmup_cosine(warmup, switch), warmup_cosine(warmup, steps - switch)
    return [lambda k: first(k) if k < switch else 0.0,
            lambda k: second(k - switch) if k >= switch else 0.0]
