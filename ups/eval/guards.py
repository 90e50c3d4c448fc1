"""Guards: what an equation keeps exactly is put back after every step of a roll-out.

    conserve   u + m0 - mean u: the mean over space stays that of the first frame, m0
    positive   max(u, 0), and where the mean is held too, that scaled back to the mean m0
    divfree    v_k - k (k . v_k) / |k|^2 in Fourier space: the part of v without divergence

`guard.fields` is the projection P of fields, exact to rounding. The guard itself is called on the
latents after a step, z -> z + E(P(D(z))) - E(D(z)) with the codec's E and D: what needs no mending
stays as it is, bit for bit. With a patch codec of all components the next step starts from the
projected field itself; where the codec compresses, from what it can express of that, which is why
fields that are handed out pass through `fields` as well. A velocity that --stride_x thins has some
divergence itself, from the scales that its grid no longer carries.
"""

import torch

from ups.config import UsageError
from ups.data.tasks import TASKS


def check_guards(names, *tasks):
    """Of the guards in "conserve,positive", or in a list, those that suit each of the `tasks`;
    refuses what suits none."""
    names = [n.strip() for n in names.split(",") if n.strip()] if isinstance(names, str) else names
    wrong = [_unsuited(task) for task in tasks]
    for name in names:
        if name not in wrong[0]:
            raise UsageError(f"there is no guard {name}; there are {', '.join(wrong[0])}.")
        if all(reasons[name] for reasons in wrong):
            raise UsageError(f"{tasks[0].name}: the guard {name} makes no sense here, for "
                             f"{wrong[0][name]}; leave it out.")
    return [tuple(name for name, reason in reasons.items() if name in names and not reason)
            for reasons in wrong]


def _unsuited(task):
    """For each guard why it makes no sense; empty where it does."""
    about, closed = TASKS[task.name], task.fields.spec.boundary != "periodic"
    return {"conserve": "" if task.conserved else "its equation keeps the mean of no channel",
            "positive": "" if about.positive else "its channels may have either sign",
            "divfree": ("it has no velocity without divergence" if not about.solenoidal else
                        "its boundary is closed and the projection is periodic" * closed)}


class Guard:
    """The guard of roll-outs of `task` that start at the true fields u0 (B, C, *grid).

    Acts on rows (B * k, ...): the k rows of a trajectory, members or frames, side by side.
    """

    def __init__(self, names, task, u0):
        spec, about = task.fields.spec, TASKS[task.name]
        (self.names,), self.codec = check_guards(names, task), task.codec
        self.axes = list(range(2, u0.ndim))
        self.means = self._mean(u0)  # (B, C, 1, ..)
        self.held = task.conserved if "conserve" in self.names else []
        positive = about.positive if "positive" in self.names else ()
        self.positive = [spec.channels.index(name) for name in positive]
        if "divfree" in self.names:
            self.velocity = [spec.channels.index(f"V{axis}") for axis in about.axes]
            self.waves = _waves(spec.grid, spec.domain).to(u0)

    def __call__(self, z):
        """Guard latents (B * k, N, D), padded or not."""
        if not self.names:
            return z
        own, rest = z.tensor_split([self.codec.spec.width], -1)
        u = self.codec.decode(own)
        change = self.codec.encode(self.fields(u)) - self.codec.encode(u)
        return torch.cat([own + change, rest], -1)

    def after(self, model):
        """The model, operator or corrector, with its prediction guarded."""
        return lambda *args, **options: self(model(*args, **options))

    def fields(self, u):
        """Project fields (B * k, C, *grid)."""
        if not self.names:
            return u
        u, means = u.clone(), self.means.repeat_interleave(len(u) // len(self.means), 0)
        for c in self.held:
            u[:, c] += (means - self._mean(u))[:, c].to(u)
        for c in self.positive:
            u[:, c].clamp_(min=0)
            if c in self.held:
                u[:, c] *= (means.clamp(min=0) / self._mean(u).clamp(min=1e-30))[:, c].to(u)
        if "divfree" in self.names:
            v, k = torch.fft.rfftn(u[:, self.velocity], dim=self.axes), self.waves
            v = v - k * (k * v).sum(1, keepdim=True) / k.square().sum(0).clamp(min=1e-30)
            u[:, self.velocity] = torch.fft.irfftn(v, u.shape[2:], self.axes)
        return u

    def _mean(self, u):
        return u.double().mean(self.axes, keepdim=True)


def _waves(grid, domain):
    """Wave numbers (axes, *modes of rfftn); zero at Nyquist, where no real field has a slope."""
    waves = [torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) for n in grid]
    waves = [torch.where(2 * k.abs() == n, 0.0, k) / (high - low)
             for k, n, (low, high) in zip(waves, grid, domain, strict=True)]
    waves[-1] = waves[-1][:grid[-1] // 2 + 1]
    return torch.stack(torch.meshgrid(*waves, indexing="ij"))
