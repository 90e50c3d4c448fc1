"""Diffusion and consistency models as pure functions.

Data with standard deviation sigma_data are blurred, x = clean + sigma * noise. A denoiser
D(x; sigma) estimates the mean of `clean` given x, and the probability flow carries x from one level
to another so that the distribution at each is right (Karras et al. 2022, EDM, eq. 1 and 3):

    dx / dsigma = (x - D(x; sigma)) / sigma

A consistency function f(x, sigma) jumps along that flow to sigma_min (Song et al. 2023). Both are
made of a raw network net(c_in x, c_noise) -> like x, whose input and target have unit variance:

    D = c_skip x + c_out net(c_in x, c_noise)    f likewise, but c_skip = 1, c_out = 0 at sigma_min

Tensors are (B, ...), mostly (B, N, D); noise levels (B,). No function draws a random number: normal
numbers are given, so that they can be a function of the seed. Where channels of x are padding, give
noise that is zero there: then they stay zero.
"""

import math

import torch

SIGMA_MIN, SIGMA_MAX = 0.002, 80.0  # for data of about unit variance


# preconditioning and training

def precondition(sigma, sigma_data=1.0):
    """c_skip, c_out, c_in, c_noise, each like sigma (EDM, table 1)."""
    total = sigma**2 + sigma_data**2
    return (sigma_data**2 / total, sigma * sigma_data / total.sqrt(), 1 / total.sqrt(),
            torch.log(sigma) / 4)


def denoise(net, x, sigma, sigma_data=1.0):
    """D(x; sigma) (B, ...), one call of net (EDM, eq. 7)."""
    c_skip, c_out, c_in, c_noise = precondition(sigma, sigma_data)
    return _times(c_skip, x) + _times(c_out, net(_times(c_in, x), c_noise))


def training_sigma(normal, mean=-1.2, std=1.2):
    """Log-normal levels (B,) from normal numbers (B,): neither trivial nor hopeless ones."""
    return torch.exp(mean + std * normal)


def denoising_loss(net, clean, sigma, noise, sigma_data=1.0, weight=None):
    """Squared error (B,) of D over c_out, which is net's own error, so of order one at any sigma.

    `weight` (D,) is that of the channels, zero where they are padding; None weighs all alike. Or it
    is a function, from the error to (B,).
    """
    error = denoise(net, clean + _times(sigma, noise), sigma, sigma_data) - clean
    return _mean_square(error, weight) / precondition(sigma, sigma_data)[1] ** 2


# sampling

def noise_levels(steps, sigma_min=SIGMA_MIN, sigma_max=SIGMA_MAX, rho=7.0):
    """Levels (steps + 1,) from sigma_max down to sigma_min, then 0 (EDM, eq. 5)."""
    ends = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    levels = torch.linspace(*ends, steps, dtype=torch.float64) ** rho
    return torch.cat([levels, levels.new_zeros(1)]).float()


def multistep(denoiser, x, sigmas, path=None):
    """Sample from x (B, ...) at sigmas[0] by denoiser(x, sigma (B,)), with one call a step.

    DPM-Solver++(2M) (Lu et al. 2022, algorithm 2): linear in D and exact in x / sigma, so that x
    shrinks as it should where the data are narrower than the levels are apart; Heun's rule
    overshoots there. The slope of D in log sigma comes from the call before. `sigmas` (steps + 1,)
    end in 0. A list `path` takes up x at each level but the last.
    """
    path = [] if path is None else path
    before = None
    for i, (sigma, after) in enumerate(zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True)):
        path.append(x)
        clean = denoiser(x, _levels(sigma, x))
        ahead = clean
        if before is not None and after > 0:
            ratio = math.log(sigma / after) / math.log(sigmas[i - 1].item() / sigma)
            ahead = clean + ratio / 2 * (clean - before)
        x, before = after / sigma * x + (1 - after / sigma) * ahead, clean
    return x


# consistency

def consistency(net, x, sigma, sigma_min=SIGMA_MIN, sigma_data=1.0):
    """f(x, sigma) (B, ...), one call of net; x itself, bit for bit, at sigma_min.

    (Song et al. 2023, appendix C.) Far above sigma_min it is `denoise` of the same net, so that a
    student starts from the weights of its teacher.
    """
    _, _, c_in, c_noise = precondition(sigma, sigma_data)
    c_skip = 1 / (1 + ((sigma - sigma_min) / sigma_data) ** 2)  # in this form exactly one
    c_out = (sigma - sigma_min) * sigma_data * c_in
    return _times(c_skip, x) + _times(c_out, net(_times(c_in, x), c_noise))


def few_step(f, x, sigmas, noise=None):
    """Sample from x (B, ...) at sigmas[0] by f(x, sigma (B,)), one call per level of sigmas.

    Between two calls x is blurred again to the next level by noise(i), i >= 1 (Song et al. 2023,
    algorithm 1).
    """
    for i, sigma in enumerate(_levels(level, x) for level in sigmas):
        if i > 0:
            x = x + _times((sigma**2 - SIGMA_MIN**2).clamp(min=0).sqrt(), noise(i))
        x = f(x, sigma)
    return x


def distillation_loss(student, teacher, x, sigmas, at, weight=None, sigma_data=1.0):
    """Squared distance (B,) of the student's jumps to where the teacher's trajectory ends.

    x (B, ...) is noise of level sigmas[0]; the student f(x, sigma) jumps from the levels `at`
    (indices of sigmas), which are those that it will be called at. The teacher carries no gradient.
    Each jump is weighed as in `denoising_loss`. In consistency distillation the student chases its
    own average from level to level, and errors add up; here every jump has the true end as target.
    """
    path = []
    with torch.no_grad():
        goal = multistep(teacher, x, sigmas, path)
    loss = 0.0
    for i in at:
        sigma = _levels(sigmas[i], x)
        error = student(path[i], sigma) - goal
        loss = loss + _mean_square(error, weight) / precondition(sigma, sigma_data)[1] ** 2
    return loss / len(at)


def _levels(sigma, x):
    """One level for all rows (B,), made on their device: a CUDA graph may not copy it there."""
    return x.new_full((len(x),), float(sigma))


def _times(s, x):
    """s (B,) times x (B, ...)"""
    return s.view(-1, *[1] * (x.ndim - 1)) * x


def _mean_square(error, weight):
    """(B, N, D) -> (B,), channels weighed by weight (D,), or what weight(error) is"""
    if callable(weight):
        return weight(error)
    weight = error.new_ones(error.shape[-1]) if weight is None else weight
    return (weight * error**2).mean(1).sum(-1) / weight.sum()
