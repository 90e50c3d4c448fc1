"""Solutions moved, mirrored and added: solutions too, that training may see beside the files'.

    circular shifts   along the axes that `facts.shifts` names
    mirror images     `facts.mirrors`: an axis ("": none), and the channels that change sign
    sums              where `facts.linear`, of a solution and a share of it, moved
"""

import torch


def symmetries(fields):
    """The axes that may be shifted, and {axis: channels that change sign} of up to three mirrors.

    Of closed axes only whole ones are mirrored: every n-th point is nearer to one of the walls.
    """
    facts = fields.facts
    whole = {axis for axis, circle in zip(facts.axes, facts.periodic, strict=True)
             if circle or fields.stride_x == 1} | {""}
    return facts.shifts, dict([pair for pair in facts.mirrors if pair[0] in whole][:3])


def moved(u, fields, shift=None, mirror=None, added=None, channels=None):
    """Values u (B, T, C, *grid) of `fields` after random moves, the same for all frames of a row.

    shift (B, 3): shares of each of three axes, of which u has the last ones. mirror (B, 3): each of
    the mirrors is taken where its number is below a half. added (B, 4): the shift of what is added,
    and how much: nothing where the last number is below a half, -1 to 1 times u above. With inputs
    nothing is added, since they move along: call it again with theirs as u and their names.
    """
    facts = fields.facts
    free, mirrors = symmetries(fields)
    if added is not None and free and facts.linear and not facts.inputs:
        share = torch.where(added[:, 3] < 0.5, 0.0, 4 * added[:, 3] - 3)
        u = u + share.view(-1, *[1] * (u.ndim - 1)) * moved(u, fields, added[:, :3])
    free, mirrors = [] if shift is None else free, {} if mirror is None else mirrors
    turned = {axis: mirror[:, k] < 0.5 for k, axis in enumerate(mirrors)}  # (B,) each
    for k, axis in enumerate(facts.axes, start=3):
        size = u.shape[k]
        index = torch.arange(size, device=u.device).expand(len(u), size)
        if axis in turned:
            index = torch.where(turned[axis][:, None], size - 1 - index, index)
        if axis in free:
            index = (index - (size * shift[:, k - u.ndim, None]).long()) % size
        if axis in turned or axis in free:
            view = [size if a == k else 1 for a in range(1, u.ndim)]
            u = u.take_along_dim(index.view(len(u), *view), k)
    for axis, odd in mirrors.items():
        sign = 1 - 2 * turned[axis].to(u.dtype)  # (B,)
        signs = [sign if name in odd else sign.abs() for name in channels or facts.channels]
        u = u * torch.stack(signs, 1).view(len(u), 1, -1, *[1] * (u.ndim - 3))
    return u
