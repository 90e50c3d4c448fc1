"""The learning rate: a straight line up to one, then a straight line down to zero."""


def up_and_down(warmup, steps):
    """The factor of the learning rate as a function of the step k = 0, 1, ..."""
    def factor(k):
        if k < warmup:
            return (k + 1) / warmup
        return max(0.0, (steps - k) / max(1, steps - warmup))

    return factor


def in_two_acts(warmup, switch, steps):
    """Factors of two groups of weights, one after the other; zero holds the other group."""
    first, second = up_and_down(warmup, switch), up_and_down(warmup, steps - switch)
    return [lambda k: first(k) if k < switch else 0.0,
            lambda k: second(k - switch) if k >= switch else 0.0]
