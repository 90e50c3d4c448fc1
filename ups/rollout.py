"""Roll-outs of an operator that may have learned several strides, the shortest of one frame.

A plan is the longest stride that is used: coarse steps first, fine ones last. With 1, 2 and 4,

    frames   0 ------------- 4 ------------- 8      steps of 4, one after the other
             0 ----- 2       4 ----- 6              of 2, all in one batch
             0 - 1   2 - 3   4 - 5   6 - 7          of 1, all in one batch

so frame 7 is 4 + 2 + 1. All T frames cost T steps under any plan; the last one alone T / 4 here.
"""

from collections import Counter

import torch


def waves(leads, strides):
    """[(stride, frames to step from)], in order, that reach the frames `leads` from frame 0.

    The steps of a wave are independent of each other.
    """
    needed, found, strides = {*leads}, {}, sorted(strides, reverse=True)
    for frame in range(max(leads), 0, -1):
        if frame not in needed:
            continue
        rest = frame
        for level, stride in enumerate(strides):
            count, rest = divmod(rest, stride)
            if count:  # the last ones: so many steps of this stride end here
                last = level, count
        stride = strides[last[0]]
        needed.add(frame - stride)
        found.setdefault(last, (stride, []))[1].append(frame - stride)
    return [found[key] for key in sorted(found)]


def roll_out(model, z0, dt, cond, task, leads, strides=(1,), inputs=None):
    """Yield (lead, z (B, N, D)) for the frames `leads`, in the order in which they are reached.

    z0 (B, N, D), dt (B,) of one frame, cond (B, P), input tokens (B, T or 1, N, E) if any. With a
    history z0 is (B, H, N, D), and the window moves on by each step.
    """
    todo, states, asked = waves(leads, strides), {0: z0}, {*leads}
    left = Counter(frame for _, starts in todo for frame in starts)  # steps from it to come
    known = hasattr(model, "modulate") and not hasattr(model, "reshard")  # FSDP2: within `forward`
    once = {}  # what a step of one size and as many rows repeats
    for stride, starts in todo:
        count = len(starts)
        if (stride, count) not in once:
            given = stride * dt.repeat(count), cond.repeat(count, 1)
            more = {"modulation": model.modulate(*given, task)} if known else {}
            once[stride, count] = given, more
        (dts, conds), more = once[stride, count]
        z = torch.cat([states[frame] for frame in starts])
        tokens = inputs if inputs is None else torch.cat([inputs_at(inputs, k) for k in starts])
        ends = model(z, dts, conds, task, tokens, **more)
        windows = moved_on(z, ends).chunk(count)
        for frame, end, window in zip(starts, ends.chunk(count), windows, strict=True):
            left[frame] -= 1
            if not left[frame]:
                del states[frame]
            if left[frame + stride]:
                states[frame + stride] = window
            if frame + stride in asked:
                yield frame + stride, end


def moved_on(z, end):
    """What the next step starts from: the end of this one, or the window of a history with it."""
    return end if z.ndim == 3 else torch.cat([z[:, 1:], end[:, None]], 1)


def inputs_at(inputs, frame):
    """Input tokens (B, N, E) from which a step starts: those of its frame, or the one for all."""
    return None if inputs is None else inputs[:, frame if inputs.shape[1] > 1 else 0]


def choose_plan(plans, leads, accuracy=None):
    """The plan with the least error at the frames `leads`; with `accuracy`, the cheapest whose
    error is at most that, or None.

    plans: {longest stride: errors of the frames 1, 2, ..}; a later frame counts as the last of them
    """
    errors = {longest: plan_error(known, leads) for longest, known in plans.items()}
    if accuracy is None:
        return min(errors, key=errors.get)
    cost = {longest: sum(len(starts) for _, starts in waves(leads, within(plans, longest)))
            for longest, error in errors.items() if error <= accuracy}
    return min(cost, key=lambda longest: (cost[longest], errors[longest]), default=None)


def plan_error(known, leads):
    return sum(known[min(lead, len(known)) - 1] for lead in leads) / len(leads) if known else 0.0


def within(strides, longest):
    """The strides of a plan."""
    return tuple(stride for stride in sorted(strides) if stride <= longest)
