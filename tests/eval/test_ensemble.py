"""Ensembles and what correctors learn from, with models that can be followed by hand."""

import pytest
import torch
from factual import CIRCLE, facts

from ups.cache.windows import LatentWindows
from ups.eval.ensemble import corrected, member_noise, perturbed
from ups.models.generators import Corrector, compress, compression, expand
from ups.models.latent_operator import OperatorConfig, TaskSpec
from ups.residuals import Residuals


def operator(z, dt, cond, task, inputs=None):
    return 2 * z + dt[:, None, None]


class Adds:
    """A corrector that adds its noise and a tenth of the lead."""

    def draw(self, z0, z1_hat, lead, dt, cond, noise, task, calls, inputs=None):
        assert torch.equal(z1_hat, operator(z0, dt, cond, task))
        return z1_hat + noise[:, 0] + 0.1 * lead[:, None, None]


def draws(**options):
    z0, noise = torch.randn(3, 4, 2), torch.randn(3, 5, 2, 4, 2)
    dt, cond = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 0)
    return z0, noise, dict(corrected(operator, Adds(), z0, 6, dt, cond, 0, noise, 1, **options))


def exact(z0, k):
    """The operator's own line: z -> 2 z + dt."""
    dt = torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    return 2**k * z0 + (2**k - 1) * dt


def test_members_are_drawn_anew_at_every_lead_and_never_fed_back():
    z0, noise, members = draws()
    assert list(members) == [1, 2, 3, 4, 5, 6]
    for k, z in members.items():
        torch.testing.assert_close(z, exact(z0, k)[:, None] + noise[:, :, 0] + 0.1 * k)


def test_between_two_corrections_the_operator_carries_the_members():
    z0, noise, members = draws(correct_every=3)
    torch.testing.assert_close(members[2], exact(z0, 2)[:, None].expand(-1, 5, -1, -1))
    at = exact(z0, 3)[:, None] + noise[:, :, 0] + 0.3
    torch.testing.assert_close(members[3], at)
    dt = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    torch.testing.assert_close(members[5], 4 * at + 3 * dt)
    torch.testing.assert_close(members[6], exact(z0, 6)[:, None] + noise[:, :, 0] + 0.6)


@pytest.mark.parametrize("options", [{"leads": (2, 6)}, {"rows": 4},
                                     {"leads": (5,), "correct_every": 3, "rows": 1}])
def test_some_leads_and_small_chunks_give_the_same(options):
    torch.manual_seed(0)
    _, _, some = draws(**options)
    torch.manual_seed(0)
    options = {key: value for key, value in options.items() if key == "correct_every"}
    _, _, members = draws(**options)
    assert all(torch.equal(z, members[k]) for k, z in some.items())
    assert len(some) in (1, 2, 6)


def test_perturbed_inputs_are_carried_by_the_operator():
    z0, noise, dt = torch.randn(2, 4, 2), torch.randn(2, 3, 4, 2), torch.ones(2)
    size = torch.tensor([0.5, 0.1])
    members = dict(perturbed(operator, z0, 3, dt, torch.zeros(2, 0), 0, noise, size, leads=(3,)))
    torch.testing.assert_close(members[3], 8 * (z0[:, None] + size * noise) + 7)


def test_noise_belongs_to_the_trajectory():
    whole, some = member_noise(0, [7, 3, 9], 4, 2), member_noise(0, torch.tensor([9, 7]), 4, 2)
    assert torch.equal(some, whole[[2, 0]]) and not torch.equal(whole[0], whole[1])
    assert not torch.equal(member_noise(1, [7], 4, 2)[0], whole[0])


def test_compression_gives_unit_variance_and_is_undone():
    torch.manual_seed(0)
    r = torch.randn(40, 6, 3) * torch.tensor([1e-3, 2.0, 0.0])
    r[::10] *= 300  # fronts
    lead = torch.arange(40) % 4 + 1
    table = compression(r, lead)
    assert table.shape == (3, 4, 3) and (table[:, :, 2] == 0).all()
    rows = table[:, lead - 1].transpose(0, 1)[:, :, None]
    x = compress(r, rows)
    for k in range(1, 5):
        torch.testing.assert_close(x[lead == k].square().mean((0, 1)), torch.tensor([1.0, 1.0, 0]))
    torch.testing.assert_close(expand(x, rows), r, rtol=1e-4, atol=1e-7)
    most = r[lead == 1].abs().amax((0, 1))
    assert (expand(x * 100, rows)[lead == 1].abs() <= most * (1 + 1e-4)).all()


def corrector(kind="diffusion"):
    tasks = [TaskSpec("a", (1, 1, 8), 2, CIRCLE), TaskSpec("b", (1, 1, 4), 3, CIRCLE)]
    tables = [torch.ones(3, 4, 3), torch.ones(3, 2, 3)]
    tables[0][:, :, 2] = 0  # the padding of the narrow task
    sizes = OperatorConfig(dim=16, depth=1, modes=2)
    return Corrector(sizes, tasks, tables, kind)


@pytest.mark.parametrize("kind, calls", [("diffusion", 1), ("diffusion", 8), ("consistency", 1),
                                         ("consistency", 2)])
def test_a_draw_counts_its_calls_and_leaves_the_padding_alone(kind, calls):
    model, count = corrector(kind), []
    torch.nn.init.normal_(model.net.body.out[0].weight)
    model.net.register_forward_hook(lambda *_: count.append(1))
    z0, z1_hat = torch.randn(2, 5, 8, 3)
    z0[..., 2] = z1_hat[..., 2] = 0
    noise = torch.randn(5, 2, 8, 3)
    given = (torch.tensor([1, 2, 3, 4, 9]), torch.ones(5), torch.zeros(5, 0))  # 9: as the last
    z1 = model.draw(z0, z1_hat, *given, noise, 0, calls)
    assert len(count) == calls and (z1[..., 2] == 0).all() and z1.isfinite().all()
    assert not torch.equal(z1, model.draw(z0, z1_hat, *given, -noise, 0, calls))
    assert not torch.equal(z1, model.draw(0.5 * z0, z1_hat, *given, noise, 0, calls))


def test_members_keep_conserved_means():
    """z0 -> z1_hat keeps them, so what is drawn beside must not move them."""
    task = TaskSpec("a", (1, 1, 8), 2, CIRCLE, conserved_directions=((0.5, 2.0),))
    model = Corrector(OperatorConfig(dim=16, depth=1, modes=2), [task], [torch.ones(3, 4, 2)])
    torch.nn.init.normal_(model.net.body.out[0].weight)
    z = torch.randn(5, 8, 2)
    given = (torch.ones(5).long(), torch.ones(5), torch.zeros(5, 0), torch.randn(5, 2, 8, 2))
    moved = (model.draw(z, z, *given, 0, 4) - z).mean(1)
    assert (moved @ torch.tensor([0.5, 2.0])).abs().max() < 1e-5 < 0.01 < moved.abs().max()


class Memory:
    """A cache in memory: trajectory n, frame t has the value 10 n + t."""

    dt, params, weight, shape = 0.5, torch.zeros(4, 0), torch.ones(2), (4, 6, 3, 2)
    facts, inputs = facts(), ()
    z = [(10 * torch.arange(4)[:, None] + torch.arange(6)).float()[:, :, None, None]
         .expand(4, 6, 3, 2).contiguous()]

    def __len__(self):
        return 4


def test_residuals_are_those_of_the_operators_own_states():
    windows = LatentWindows([Memory()], 5)
    data = Residuals(lambda z, dt, cond, task: z + 1.25, windows, "cpu", start_every=2)
    assert data.sizes == [4 * (5 + 3 + 1)]  # starts 0, 2, 4 of six frames
    items = [(7, row, (0, row)) for row in range(36)]
    batch = data.__getitems__(items)
    z0, z1_hat, z1 = batch["z"][:, :, 0, 0].unbind(1)
    torch.testing.assert_close(z1_hat - z0, torch.full((36,), 1.25))
    torch.testing.assert_close(z1_hat - z1, 0.25 * batch["lead"].float())  # it grows with the lead
    assert sorted(batch["lead"][:9].tolist()) == [1, 1, 1, 2, 2, 3, 3, 4, 5]
    assert len(set(zip(z1.tolist(), batch["lead"].tolist(), strict=True))) == 36
    table = data.compression(0)
    torch.testing.assert_close(table[0, :, 0], 0.25 * torch.arange(1.0, 6.0))
    assert batch["step"] == 7 and batch["rows"].tolist() == list(range(36))
    assert batch["dt"].tolist() == [0.5] * 36
