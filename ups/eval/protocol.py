"""How a roll-out begins and which frames count.

    initial    from the first frame of a trajectory; all others count
    pdebench   ten frames are given, of which an operator sees the last; those after them count
"""

from ups.config import UsageError
from ups.data.fields import Fields

FOLDERS = {"initial": "evaluation", "pdebench": "evaluation_pdebench"}  # in the run's folder
GIVEN = 10  # frames that PDEBench gives
PUBLISHED = {"advection1d": (256, 41), "burgers1d": (256, 41), "diffreact2d": (128, 101),
             "swe2d": (128, 101), "darcy2d": (128, 2)}  # points per axis and frames, after strides


def begin(fields, protocol):
    """The fields from the first frame that a roll-out sees."""
    file, step = fields.files[0], fields.frames.step
    if protocol == "initial" or fields.facts.steady:
        return fields
    if (frames := file.facts.frames) <= GIVEN * step:
        raise UsageError(f"--protocol pdebench gives {GIVEN} frames; {file.path} has "
                         f"{-(-frames // step)} at --stride_t {step}; use --protocol initial, "
                         "or longer data.")
    return Fields(fields.files, fields.stride_x, step, (GIVEN - 1) * step)


def in_words(spec, protocol):
    """The protocol in a phrase, and a warning where it is not the published one."""
    size = f"{' x '.join(map(str, spec.grid))} points, steps of {spec.dt:g}"
    steady = spec.steady
    steps = f"{spec.frames - 1} step{'s' * (spec.frames > 2)}"
    if protocol == "initial" or steady:
        text, frames = f"rolled out from one true frame over {steps}; {size}", spec.frames
    else:
        text = (f"PDEBench: {GIVEN} frames given, of which the operator sees the last; "
                f"scored on the {steps} after them; {size}")
        frames = spec.frames + GIVEN - 1
    published = PUBLISHED.get(spec.name)
    if protocol == "initial" or published in (None, (spec.grid[0], frames)):
        return text
    long = "" if steady else f" and {published[1]} frames"
    return f"{text} (published: {published[0]} points an axis{long}: do not compare)"
