"""Every metric against an independent formula, written as loops or closed forms."""

import math

import numpy as np
import pytest
import torch

from ups.eval import metrics as m
from ups.relative_error import mean_relative_error

GRIDS = ((18,), (16, 12), (6, 8, 5))


def pair(grid, seed=0, shape=(2, 3, 2)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, *grid, generator=generator, dtype=torch.float64) for _ in range(2)]


def by_hand(function, p, y):
    """Apply a numpy function of one field pair to every (trajectory, frame, channel)."""
    shape = p.shape[:3]
    rows = [function(a.numpy(), b.numpy()) for a, b in
            zip(p.flatten(0, 2), y.flatten(0, 2), strict=True)]
    return torch.tensor(np.array(rows)).unflatten(0, shape)


@pytest.mark.parametrize("grid", GRIDS)
def test_pointwise_errors(grid):
    p, y = pair(grid)
    y[..., 0] += 3.0
    points = math.prod(grid)
    formulas = {
        "rmse": lambda a, b: math.sqrt(((a - b) ** 2).sum() / points),
        "vrmse": lambda a, b: math.sqrt(((a - b) ** 2).mean() / (b.var() + 1e-7)),
        "max_error": lambda a, b: np.abs(a - b).max(),
        "crmse": lambda a, b: abs(a.sum() - b.sum()) / points,
        "size": lambda a, b: math.sqrt((b**2).sum() / points),
        "correlation": lambda a, b: np.corrcoef(a.ravel(), b.ravel())[0, 1],
        "brmse": lambda a, b: boundary(a - b),
        "frmse": lambda a, b: bands(a - b),
    }
    values = {name: function(p, y) for name, function in m.FIELD.items()}
    values |= {"nrmse": m.channel_nrmse(p, y), "spectrum": m.spectrum(p)}
    formulas |= {"nrmse": lambda a, b: math.sqrt(((a - b) ** 2).sum() / (b**2).sum()),
                 "spectrum": lambda a, b: shells(a)}
    assert formulas.keys() == values.keys()
    for name, formula in formulas.items():
        torch.testing.assert_close(values[name], by_hand(formula, p, y), equal_nan=True, msg=name)
    torch.testing.assert_close(m.nrmse(p, y), m.channel_nrmse(p, y).mean(2))
    torch.testing.assert_close(m.spectrum(p).sum(3), p.flatten(3).square().mean(3) / 2)  # Parseval


def boundary(error):
    faces = [face for axis in range(error.ndim) for face in
             (np.take(error, 0, axis), np.take(error, -1, axis))]
    return math.sqrt(np.square(np.concatenate([np.ravel(face) for face in faces])).mean())


def modes(field):
    """(|k|, |amplitude|^2) of every mode of the full transform, by loops."""
    amplitude = np.abs(np.fft.fftn(field) / field.size) ** 2
    for place in np.ndindex(*field.shape):
        k = [i if i <= n // 2 else i - n for i, n in zip(place, field.shape, strict=True)]
        yield k, amplitude[place]


def shells(field):
    most = math.floor(math.sqrt(sum((n // 2) ** 2 for n in field.shape)))
    energy = np.zeros(most + 1)
    for k, power in modes(field):
        energy[math.floor(math.sqrt(sum(i * i for i in k)))] += power / 2
    return energy


def bands(error):
    if error.ndim == 1:  # PDEBench: k >= 0 alone
        size = np.abs(np.fft.rfft(error)) / len(error)
    else:
        size = np.sqrt(2 * shells(error))
    cut = size[:4], size[4:12], size[12:]
    return [band.mean() if len(band) else math.nan for band in cut]


def test_a_prediction_that_is_not_a_number_is_the_worst_one():
    """And not one to be left out: a model of NaN would be the best by validation."""
    y = torch.randn(2, 3, 2, 8)
    p = y.clone()
    p[0, 1, 1, 4], p[1, 2, 0, 0] = math.nan, math.inf
    assert m.nrmse(p, y).tolist() == [[0, math.inf, 0], [0, 0, math.inf]]
    assert m.nrmse(y, p).tolist() == [[0, math.inf, 0], [0, 0, math.inf]]  # nor is such a truth


def test_zero_channels_are_left_out_of_nrmse_alone():
    p, y = pair((16,))
    y[:, :, 1] = 0.0
    torch.testing.assert_close(m.nrmse(p, y), m.channel_nrmse(p, y)[:, :, 0])
    assert m.channel_nrmse(p, y)[:, :, 1].isnan().all()
    assert (m.nrmse(p[:, :, 1:], y[:, :, 1:]) == 0).all()
    assert m.FIELD["vrmse"](p, y)[:, :, 1].isfinite().all()


def test_relative_l2_and_drift():
    p, y = pair((16, 12))
    error, size = ((x.transpose(1, 2).flatten(2)).norm(dim=2) for x in (p - y, y))
    torch.testing.assert_close(m.relative_l2(*(m.FIELD[name](p, y)
                                              for name in ("rmse", "size"))), error / size)
    u0, moved = y[:, 0] + 2.0, torch.tensor([0.0, 0.5, 1.0])
    shifted = u0[:, None] + moved[:, None, None, None]
    rms = u0[:, 1].flatten(1).square().mean(1).sqrt()
    torch.testing.assert_close(m.drift(shifted, u0, [1]), moved / rms[:, None])


def test_correlation_time_ends_at_the_first_loss():
    table = torch.tensor([[0.99, 0.9, 0.7, 0.95], [0.9, 0.9, 0.9, 0.9], [0.1, 0.9, 0.9, 0.9]])
    assert m.correlation_time(table[..., None], 0.5)[:, 0].tolist() == [1.0, 2.0, 0.0]
    flat = torch.ones(1, 1, 1, 8)
    wave = torch.randn(1, 1, 1, 8)
    assert m.correlation(wave, flat).item() == 1.0 and m.correlation(flat, wave).item() == 0.0


def test_spectrum_error_of_a_damped_high_band():
    _, y = pair((64,), shape=(4, 1, 1))
    p = torch.fft.rfft(y)
    p[..., 12:] *= math.sqrt(0.5)  # half of the energy from k = 12 on
    missing, there = m.spectrum_error(m.spectrum(torch.fft.irfft(p)), m.spectrum(y), (64,))
    assert (missing.mean() / there.mean()).item() == pytest.approx(0.5)
    # of 64 points the band begins at 12, of 32 at half of the 16 wavenumbers
    waves = torch.zeros(1, 1, 1, 17)
    waves[..., 7], waves[..., 8] = 1.0, 2.0
    assert [m.spectrum_error(0 * waves, waves, (n,))[1].item() for n in (64, 32)] == [0.0, 2.0]


def test_crps_against_the_double_loop():
    generator = torch.Generator().manual_seed(1)
    members = torch.randn(3, 7, 2, 4, 5, generator=generator)
    y = torch.randn(3, 2, 4, 5, generator=generator)
    x, total = members.double(), torch.zeros(3, 2, 4, 5, dtype=torch.float64)
    for i in range(7):
        total += (x[:, i] - y).abs() / 7
        for j in range(7):
            total -= (x[:, i] - x[:, j]).abs() / (2 * 7 * 6)
    torch.testing.assert_close(m.crps(members, y), total.mean((2, 3)))
    torch.testing.assert_close(m.crps(members[:, :1], y), (x[:, 0] - y).abs().mean((2, 3)))


def test_a_perfect_ensemble():
    """Members and truth from N(0, 1): CRPS is 1/sqrt(pi) for any M, spread/skill 1, ranks flat."""
    generator = torch.Generator().manual_seed(2)
    for count in (2, 5):
        x = torch.randn(20, count, 1, 100, 100, generator=generator)
        y = torch.randn(20, 1, 100, 100, generator=generator)
        assert m.crps(x, y).mean().item() == pytest.approx(1 / math.sqrt(math.pi), rel=0.01)
        variance, error = m.spread_skill(x, y)
        assert (variance.mean() / error.mean()).sqrt().item() == pytest.approx(1, rel=0.01)
        ranks = m.rank_histogram(x, y)
        torch.testing.assert_close(ranks.sum(2), torch.ones(20, 1, dtype=torch.float64))
        assert (ranks.mean((0, 1)) * (count + 1) - 1).abs().max() < 0.02


def test_the_energy_score_by_loops_and_in_closed_form():
    """Of N(0, I) in n dimensions it is G((n + 1) / 2) / G(n / 2), over the root of n for our norm;
    at a single point it is the CRPS."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(20_000, 3, 1, 5, generator=generator), torch.randn(20_000, 1, 5,
                                                                          generator=generator)
    score = m.energy_score(x, y)
    expected = math.gamma(3) / math.gamma(2.5) / 5**0.5
    assert score.mean().item() == pytest.approx(expected, rel=0.01)
    error = sum((x[0, i] - y[0]).norm() for i in range(3)) / 3
    pairs = sum((x[0, i] - x[0, j]).norm() for i in range(3) for j in range(3)) / 12
    assert score[0, 0].item() == pytest.approx(((error - pairs) / 5**0.5).item(), rel=1e-5)
    torch.testing.assert_close(m.energy_score(x[..., :1], y[..., :1]),
                               m.crps(x[..., :1], y[..., :1]))


@pytest.mark.parametrize("count", [3, 16])
def test_coverage_is_that_of_the_normal_distribution(count):
    """Of members from N(0, 1) and a truth from N(0, s^2); exact for s = 1, however few members."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(20, n, 100, 100, generator=generator) for n in (count, 1))
    for share in (0.5, 0.9):
        ranks = m.rank_histogram(x[:, :, None], y)
        assert m.coverage(ranks, share).mean().item() == pytest.approx(share, abs=0.01)
    z = 0.6744898  # the central half of N(0, 1) ends there
    many = torch.randn(1, 4000, 1, 10, 10, generator=generator)
    wide = m.coverage(m.rank_histogram(many, 2 * y[:1, :, :10, :10].expand(1, 1, 10, 10)), 0.5)
    by_hand = (2 * y[0, 0, :10, :10]).abs() < z
    assert wide.item() == pytest.approx(by_hand.double().mean().item(), abs=0.03)


@pytest.mark.parametrize("grid", GRIDS)
def test_block_means_by_loops(grid):
    u, _ = pair(grid)
    whole = m.block_means(u, 4)
    assert whole.shape[3:] == tuple(n // 4 for n in grid)
    for place in np.ndindex(*whole.shape[3:]):
        block = u[(..., *(slice(4 * k, 4 * k + 4) for k in place))]
        torch.testing.assert_close(whole[(..., *place)], block.flatten(3).mean(3))
    assert m.block_means(u, 100).flatten(3).shape[3] == 1


def test_ranks_by_hand_and_ties():
    members = torch.tensor([0.0, 1.0, 1.0, 2.0]).view(1, 4, 1, 1)
    for truth, expected in ((-1.0, [1, 0, 0, 0, 0]), (0.5, [0, 1, 0, 0, 0]), (3.0, [0, 0, 0, 0, 1]),
                            (1.0, [0, 1 / 3, 1 / 3, 1 / 3, 0])):
        ranks = m.rank_histogram(members, torch.full((1, 1, 1), truth))
        torch.testing.assert_close(ranks[0, 0], torch.tensor(expected, dtype=torch.float64))


def test_the_interval_of_a_mean_has_the_textbook_width():
    values = torch.randn(400, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = m.resamplings(400)
    torch.testing.assert_close(weights.sum(1), torch.ones(1000, dtype=torch.float64))
    low, high = m.interval(weights @ values)
    expected = 2 * 1.96 * values.std(0) / math.sqrt(400)
    torch.testing.assert_close(high - low, expected, rtol=0.1, atol=0)
    assert ((low < values.mean(0)) & (values.mean(0) < high)).all()


def test_the_mean_relative_error_is_a_loss_that_bears_zero_channels():
    """Of p = 0 its slope is that of |p - y| / |y|, y / |y|^2; none where y is zero."""
    y = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    p = torch.full_like(y, 0.0).requires_grad_()
    error = mean_relative_error(p, y)
    assert error.tolist() == [1.0, 0.0]
    error.sum().backward()
    torch.testing.assert_close(p.grad[0, 0], -y[0, 0] / 25)
    assert (p.grad[0, 1] == 0).all() and (p.grad[1] == 0).all()
