"""The one recipe: what follows from the size of the data, and the one dial, `--size`.

    patch    4 points of each axis; fewer where that leaves under 8 tokens, more where it leaves
             over 2^15 in all
    kernel   5 tokens on a line, 3 in 2-D and 3-D
    waves    `modes` of each axis, or all where it has fewer
    norm     a layer norm for steady fields; else products are bounded, and nothing is normalised
    latents  the fewest principal components that lose at most `codec.error`

Why: docs/training.md; what was tried: benchmarks/ABLATIONS.md.
"""

import math

TOKENS = 2**15  # of a field, at most
APART = 256  # width from which, as in 3-D, blocks are compiled one by one

# From width 128 on the learning rate falls as 1 / width.
NAMES = ("model.dim", "model.depth", "model.modes", "model.precision", "batch_size", "steps",
         "warmup", "lr", "noise_end", "ema")
SIZES = {size: dict(zip(NAMES, values, strict=True)) for size, values in {
    "s": (64, 6, 8, "float32", 32, 3000, 100, 8e-3, 8e-3, 0.99),
    "m": (128, 8, 8, "float32", 64, 20_000, 400, 2e-3, 8e-4, 0.999),
    "l": (256, 10, 12, "bfloat16", 64, 40_000, 800, 1e-3, 8e-4, 0.999),
    "xl": (512, 12, 16, "bfloat16", 64, 80_000, 1600, 5e-4, 8e-4, 0.999)}.items()}


def patches(grid):
    """Points of a token along each axis of a grid, before divisibility."""
    size = 4
    while math.prod(n / size for n in grid) > TOKENS:
        size *= 2
    return tuple(min(size, max(1, n // 8)) for n in grid)


def kernel(axes):
    """Tokens of a convolution, of a task with so many axes."""
    return 5 if axes < 2 else 3


def all_waves(tokens, periodic):
    """How many waves the axis of a token grid has that has most."""
    return max(n // 2 + 1 if circle else n for n, circle in zip(tokens, periodic, strict=True))


def told(codec, model):
    """What the rules made of one data set, in words: its `codec`, and the body's config."""
    sizes, tokens = (" x ".join(map(str, n)) for n in (codec.patch, codec.tokens))
    total = codec.channels * math.prod(codec.patch)
    words = f"{tokens} tokens of {sizes} points, {codec.width} of {total} components"
    if getattr(model, "body", "") != "fourier":
        return words
    most = all_waves(codec.tokens, codec.periodic)
    return (f"{words}; {min(model.modes, most)} of {most} waves, kernel "
            f"{model.kernel or kernel(len(codec.grid))}")
