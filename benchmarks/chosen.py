"""What benchmarks/accuracy.py asks of data and models: chosen for 100 s on one H200, on validation.

How, and what else was tried: ABLATIONS.md. Flags are those beside the defaults.
"""

import shlex

DATA = {  # what is changed in the preset medium: sizes for minutes of training
    "diffreact2d": {"samples": 500, "frames": 51},
    "swe2d": {"samples": 500, "frames": 51},
    "ns2d": {"samples": 500, "grid": 64, "nu": 0.005},
}
POINTS = "--codec.patch 1 --codec.components all --lr 4e-3 --noise_end 8e-4 "  # all waves
FLAGS = {  # by kind, and number of axes or task
    ("operator", 1): "--batch_size 64 --ema 0.999 --lr 1e-3 --noise_end 8e-4 --model.dim 128 "
                     "--model.depth 8 --model.modes 0 --model.input_whitening 1",
    ("operator", "advection1d"): POINTS + "--model.dim 64 --model.depth 4 --model.modes 129",
    ("operator", 2): "--ema 0.999 --lr 1e-3 --model.dim 192 --model.kernel 3 "
                     "--model.input_whitening 1",
    ("operator", "diffreact2d"): POINTS + "--model.dim 48 --model.depth 4 --model.modes 33",
    ("operator", "ns2d"): "--model.input_whitening 0.5",
    ("operator", "swe2d"): "--batch_size 64 --lr 4e-3",
    ("fno", 1): "--noise_end 8e-4 --model.modes 129",  # all waves
    ("fno", "advection1d"): "--lr 8e-3 --rms 0.2",
    ("fno", 2): "--batch_size 32 --noise_end 8e-4 --lr 8e-3 --rms 0.1 --model.modes 32 "
                "--model.width 48",
    ("fno", "diffreact2d"): "--model.modes 41 --model.width 32",
    ("fno", "ns2d"): "--lr 4e-3 --noise_end 8e-3",  # larger steps overflowed, with 12 waves
    ("unet", 1): "--model.width 64 --noise_end 8e-4",
    ("unet", "burgers1d"): "--lr 2e-3 --rms 0.1",
    ("unet", "advection1d"): "--no-mirror --no-sums",
    ("unet", 2): "--batch_size 32 --noise_end 8e-4 --lr 2.5e-4",
    ("unet", "diffreact2d"): "--lr 8e-3 --rms 0.025",
    ("unet", "swe2d"): "--lr 4e-3 --rms 0.025",
}


def flags_of(model, task):
    """What is set for a kind of model and number of axes, for the task, then by the user."""
    kind, *more = shlex.split(model)
    keys = (int(task[-2]), task)  # the axes end the name: burgers1d
    return [*shlex.split(" ".join(FLAGS.get((kind, key), "") for key in keys)), *more]
