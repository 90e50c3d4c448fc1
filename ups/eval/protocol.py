"""How a roll-out begins and which frames count.

    initial    from the first frame of a trajectory; all others count
    pdebench   ten frames are given, of which an operator sees the last; those after them count
"""

from ups.config import UsageError
from ups.data.fields import Fields
from ups.data.tasks import TASKS

FOLDERS = {"initial": "evaluation", "pdebench": "evaluation_pdebench"}  # in the run's folder
GIVEN = 10  # frames that PDEBench gives
PUBLISHED = {"advection1d": (256, 41), "burgers1d": (256, 41), "diffreact2d": (128, 101),
             "swe2d": (128, 101)}  # points per axis and frames, after the published strides


def begin(fields, protocol):
    """The fields from the first frame that a roll-out sees."""
    file, step = fields.files[0], fields.frames.step
    if protocol == "initial" or TASKS[fields.spec.task].layout == "steady":
        return fields
    if file.frames <= GIVEN * step:
        raise UsageError(f"--protocol pdebench gives {GIVEN} frames, and {file.path} has "
                         f"{-(-file.frames // step)} at --stride_t {step}; use --protocol initial, "
                         "or longer data.")
    return Fields(fields.files, fields.stride_x, step, (GIVEN - 1) * step)


def in_words(spec, protocol):
    """The protocol in a phrase, and a warning where it is not the published one."""
    size = f"{' x '.join(map(str, spec.grid))} points, steps of {spec.dt:g}"
    if protocol == "initial" or TASKS[spec.task].layout == "steady":
        return f"rolled out from one true frame over {spec.frames - 1} steps; {size}"
    text = (f"PDEBench: {GIVEN} frames given, of which the operator sees the last; the "
            f"{spec.frames - 1} frames after them count; {size}")
    points, frames = PUBLISHED.get(spec.task, (None, None))
    if points and (points, frames) != (spec.grid[0], spec.frames + GIVEN - 1):
        text += f" (published: {points} points an axis and {frames} frames: do not compare)"
    return text
