"""Solutions moved, mirrored and added: solutions too, that training may see beside the files'.

    circular shifts   along the axes of a periodic task that are not `forced`
    mirror images     the `mirrors` of a task: an axis, and the channels whose sign turns with it
    sums              of a solution of a `linear` task and a share of it, moved
"""

import torch


def symmetries(fields):
    """Names of the axes that may be shifted, and the mirrors, each of which may be taken or not.

    Of closed axes only whole ones are mirrored: every n-th point is nearer to one of the walls.
    """
    facts = fields.facts
    whole = {axis for axis, circle in zip(facts.axes, facts.periodic, strict=True)
             if circle or fields.stride_x == 1} | {""}
    return facts.shifts, {axis: odd for axis, odd in facts.mirrors if axis in whole}


def moved(u, fields, shift=None, mirror=None, added=None):
    """Values u (B, T, C, *grid) of `fields` after random moves, the same for all frames of a row.

    shift (B, 3): shares of each of three axes, of which u has the last ones. mirror (B, 3): each of
    the task's mirrors is taken where its number is below a half. added (B, 4): the shift of what is
    added, and how much: nothing where the last number is below a half, -1 to 1 times u above.
    """
    free, mirrors = symmetries(fields)
    if added is not None and free and fields.facts.linear:
        share = torch.where(added[:, 3] < 0.5, 0.0, 4 * added[:, 3] - 3)
        u = u + share.view(-1, *[1] * (u.ndim - 1)) * moved(u, fields, added[:, :3])
    free, mirrors = [] if shift is None else free, {} if mirror is None else mirrors
    turned = {name: mirror[:, k] < 0.5 for k, name in enumerate(mirrors)}  # (B,) each
    for axis, name in enumerate(fields.facts.axes, start=3):
        size = u.shape[axis]
        index = torch.arange(size, device=u.device).expand(len(u), size)
        if name in turned:
            index = torch.where(turned[name][:, None], size - 1 - index, index)
        if name in free:
            index = (index - (size * shift[:, axis - u.ndim, None]).long()) % size
        if name in turned or name in free:
            view = [size if a == axis else 1 for a in range(1, u.ndim)]
            u = u.take_along_dim(index.view(len(u), *view), axis)
    for name, odd in mirrors.items():
        if not odd:
            continue
        sign = 1 - 2 * turned[name].to(u.dtype)  # (B,)
        signs = [sign if channel in odd else sign.abs() for channel in fields.facts.channels]
        u = u * torch.stack(signs, 1).view(len(u), 1, -1, *[1] * (u.ndim - 3))
    return u
