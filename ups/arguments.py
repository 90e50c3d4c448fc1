"""The arguments of `Simulator.rollout`: what is wrong is refused in a sentence."""

import math
import numbers
import warnings

import numpy as np
import torch

from ups.config import UsageError
from ups.data.write import unmasked
from ups.memory import require_memory
from ups.rollout import choose_plan, plan_error

FEWER = "ask for fewer steps at a time"
MARGIN = 0.25  # of the range in training: a field that leaves it by more is told


def check_whole(least, **values):
    """Refuse what is no whole number of at least so much; a count may be None."""
    for name, value in values.items():
        if not (value is None and least) and not (isinstance(value, numbers.Integral)
                                                  and least <= value < 2**63):
            raise UsageError(f"{name}={value!r}: it is a whole number, {least} or more.")


def plan_of(task, steps, times, dt, accuracy, stride):
    """The frames 1, 2, .. that are asked for, and the longest step to them: ups/rollout.py."""
    plans, unit = task.plans, task.facts.dt
    if (steps is None) == (times is None):
        raise UsageError("give the number of steps, or times=.")
    if sum(value is not None for value in (dt, accuracy, stride)) > 1:
        raise UsageError("give one of dt=, accuracy= and stride=.")
    for name, value in {"dt": dt, "accuracy": accuracy}.items():
        if not isinstance(value, numbers.Real | None):
            raise UsageError(f"{name}={value!r}: it is a number.")
    if dt is not None:
        stride = next((n for n in plans if math.isclose(dt, n * unit, rel_tol=1e-4)), None)
        if stride is None:
            raise UsageError(f"dt={dt:g}: this run has learned steps of "
                             f"{listed(n * unit for n in plans)}; leave dt out, and ask for frames "
                             f"by times=, multiples of {unit:g}.")
    if stride not in (None, *plans):
        raise UsageError(f"stride={stride!r}: this run has learned steps of {listed(plans)} "
                         "frames.")
    every = 1 if dt is None else stride
    leads = range(every, every * steps + 1, every) if times is None else _frames_at(times, unit)
    require_memory(400 * leads[-1], f"a roll-out of {leads[-1]} steps", FEWER)
    if accuracy is not None and not all(plans.values()):
        raise UsageError("accuracy= needs the errors of validation, and the run has no "
                         "operator/choices.json with them; leave accuracy out.")
    longest = stride or choose_plan(plans, leads, accuracy)
    if longest is None:
        best = min(plan_error(known, leads) for known in plans.values())
        raise UsageError(f"accuracy={accuracy:g}: no way to these frames is so accurate; the best "
                         f"has {best:.2g} on the validation split.")
    return tuple(leads), longest


def _frames_at(times, unit):
    times = np.ravel(_numbers("times", times))
    leads = np.maximum(1, np.nan_to_num(times / unit).round())
    for time, lead in zip(times, leads, strict=True):
        if not abs(time / unit - lead) <= 0.01:
            raise UsageError(f"times holds {time:g}, and steps are of {unit:g} from u0 on; the "
                             f"nearest is {lead * unit:g}.")
    leads = [*map(int, leads)]
    if not leads or leads != sorted({*leads}):
        raise UsageError("times are one or more, in ascending order.")
    return leads


def rows_of(task, steps, u0, params, inputs):
    """What goes in, one row a trajectory: fields u0 (B, C, *grid), the condition (B, P), and the
    given channels (B, T or 1, E, *grid), T >= steps, or None."""
    facts, axes = task.facts, len(task.facts.grid)
    params, inputs = ({} if given is None else given for given in (params, inputs))
    varied = [name for name, scale in zip(facts.params, facts.scales, strict=True)
              if scale.low < scale.high]
    _check_names("params", params, varied, facts.params, task.name)
    _check_names("inputs", inputs, facts.inputs, facts.inputs, task.name)

    u = _tensor("u0", u0)
    if u.shape[1:] != shape_of(task) or not u.numel():
        raise wrong_shape("u0", u, f"{task.name} here takes (batch, {listed(shape_of(task))}): "
                          f"{'frames, ' * (task.history > 1)}channels {', '.join(facts.channels)}, "
                          f"axes {', '.join(facts.axes)}")
    for name, part, (low, high) in zip(facts.channels, u.unbind(-1 - axes),
                                       task.codec.seen.T.tolist(), strict=True):
        _look(f"{name} of u0", part, low, high, MARGIN * (high - low))

    columns, fields, batch = [torch.ones(len(u), 0)], [], len(u)
    for name, scale in zip(facts.params, facts.scales, strict=True):
        what = f"params[{name!r}]"
        value = _tensor(what, params.get(name, scale.low)).double().cpu()
        if value.shape not in ((), (batch,)):
            raise wrong_shape(what, value, f"give a number, or {batch} of them, one per row of u0")
        if scale.log and (value <= 0).any():
            raise UsageError(f"{what} must be positive.")
        _look(name, value, scale.low, scale.high, 1e-6 * max(abs(scale.low), abs(scale.high)))
        columns.append(value.expand(batch)[:, None])

    for name in facts.inputs:
        what, grid = f"inputs[{name!r}]", listed(facts.grid)
        given = _tensor(what, inputs[name])
        v = given[:, None] if given.ndim == 1 + axes else given  # (B, T or 1, *grid)
        if v.shape[2:] != facts.grid or len(v) not in (1, batch) or 1 != v.shape[1] < steps:
            raise wrong_shape(what, given, f"each is (batch, {grid}), or at all times (batch, "
                              f"{steps} or more, {grid})")
        _look(what, v)
        fields.append(v[:, :steps])
    fields = torch.stack(torch.broadcast_tensors(*fields), 2) if fields else None
    return (u, task.condition(torch.cat(columns, 1)),
            fields if fields is None else fields.expand(batch, *fields.shape[1:]))


def _check_names(what, given, needed, known, task):
    if not (isinstance(given, dict) and {*needed} <= {*given} <= {*known}):
        told = ", ".join(given) if isinstance(given, dict) else f"of {type(given)}"
        raise UsageError(f"{what} are {told or 'none'}; {task} takes "
                         f"{'a dictionary of ' * bool(known)}{', '.join(known) or 'none'}.")


def _tensor(name, values):
    """A tensor, of an array the same memory: it may be a map of a large file."""
    if torch.is_tensor(values) and not values.is_complex():
        return values
    values = _numbers(name, values)
    with warnings.catch_warnings(action="ignore"):  # of a map that is read-only: it is only read
        return torch.as_tensor(values)


def _numbers(name, values):
    """An array of numbers that torch can hold; what is masked is none."""
    try:
        values = unmasked(values)
        if (values.dtype not in (np.float16, np.float32, np.float64)  # whole, of other bytes
                or min(values.strides, default=0) < 0):
            values = values.astype(float, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} holds no real numbers ({error}).") from None
    return values


def _look(name, values, low=-math.inf, high=math.inf, margin=0.0):
    """Refuse what is no number; warn where training saw nothing alike."""
    least, most = values.detach().amin().item(), values.detach().amax().item()  # copies no map
    if not math.isfinite(least + most):
        raise UsageError(f"{name} holds NaN or Inf.")
    if least < low - margin or most > high + margin:
        warnings.warn(f"{name} is {least:.3g} to {most:.3g}; training saw {low:.3g} to {high:.3g}, "
                      "and what is outside is a guess.", stacklevel=4)


def wrong_shape(name, values, wanted):
    return UsageError(f"{name} has the shape {tuple(np.shape(values))}; {wanted}.")


def shape_of(task):
    """Of a row of u0."""
    return (*[task.history] * (task.history > 1), len(task.facts.channels), *task.facts.grid)


def listed(values):
    return ", ".join(f"{value:g}" for value in values)
