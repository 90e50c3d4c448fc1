"""Muon against the singular value decomposition, AdamW beside it, its state saved and loaded."""

import copy

import pytest
import torch
from torch import nn

from ups.train.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (8, 3, 4), (2, 3, 8, 10), (6, 4, 3, 3),
                                   (2, 1, 3, 8, 10)])
def test_an_update_keeps_the_singular_vectors_and_evens_out_the_values(shape):
    g = torch.randn(shape, dtype=torch.float64)
    one, = orthogonal([g])
    _, again, _ = orthogonal([torch.ones_like(g), 1e-6 * g, torch.randn_like(g)])
    assert torch.allclose(one, again)  # neither its size nor its neighbours matter
    many = shape[-2:] == (8, 10)
    matrices = [x.flatten(0, -3) if many else x.flatten(1)[None] for x in (g, one)]
    u, _, v = torch.linalg.svd(matrices[0], full_matrices=False)
    inner = u.mT @ matrices[1] @ v.mT / max(matrices[0].shape[1:]) ** 0.5
    values = inner.diagonal(dim1=1, dim2=2)
    assert torch.allclose(inner, torch.diag_embed(values), atol=1e-9)
    assert 0.6 < values.min() and values.max() < 1.25
    assert orthogonal([torch.zeros(shape)])[0].abs().max() == 0


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)).double()
    return model, torch.randn(16, 5, dtype=torch.float64)


def train(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - x[:, :2].sin()).square().mean().backward()
        optimizer.step()


def test_all_but_hidden_matrices_are_adamws_own():
    model, x = parts()
    lr = torch.tensor(1e-2)
    optimizer = Muon(model, model[1], lr, weight_decay=0.1, fused=True, capturable=True)
    before = copy.deepcopy(model)
    plain = torch.optim.AdamW(before.parameters(), 1e-2, weight_decay=0.1)
    train(before, plain, x, 1)
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, x, 1)
    for i, (a, b) in enumerate(zip(model.parameters(), before.parameters(), strict=True)):
        assert torch.allclose(a, b) == (i != 2), i  # the third is the hidden matrix
    grad = model[1].weight.grad
    expected = start[2] * (1 - 1e-2 * 0.1) - 0.4 * 1e-2 * orthogonal([grad])[0]
    assert torch.allclose(model[1].weight, expected)


def test_what_has_no_gradient_stands_still():
    """One of two matrices is used in a step: the other, and its momentum, wait for theirs."""
    model, kept = nn.ParameterList([torch.randn(2, 1, 8, 9)]), []
    optimizer = Muon(model, model, torch.tensor(0.1), fused=True, capturable=True, weight_decay=0)
    grads = torch.randn(2, 1, 8, 9)
    for own in (0, 1, 1, 0):
        before = model[0].detach().clone()
        model[0].grad = torch.zeros(2, 1, 8, 9)
        model[0].grad[own] = grads[own]
        optimizer.step()
        moved = (model[0].detach() - before).flatten(1).abs().amax(1) > 0
        assert moved.tolist() == [own == 0, own == 1]
        kept.append(optimizer.state[model[0]]["momentum"][0].clone())
    assert torch.equal(kept[0], kept[2]) and not torch.equal(kept[2], kept[3])


def test_adamws_own_weights_stand_still_too():
    """Rows of two tasks, in turns: each is as if it had been alone, but for the count of steps."""
    together, alone = nn.ParameterList([torch.ones(2, 4)]), nn.ParameterList([torch.ones(1, 4)])
    options = dict(fused=True, capturable=True, betas=(0.9, 0.999), weight_decay=0)
    both, one = (Muon(m, nn.ParameterList(), torch.tensor(0.1), **options)
                 for m in (together, alone))
    grads = torch.randn(3, 4)
    for step in range(6):
        together[0].grad = torch.zeros(2, 4)
        together[0].grad[step % 2] = grads[step // 2]
        before = together[0].detach().clone()
        both.step()
        if step % 2 == 0:
            alone[0].grad = grads[step // 2][None].clone()
            one.step()
        assert torch.equal(together[0][1 - step % 2], before[1 - step % 2]) or step == 0
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(both.state[together[0]][key][0], one.state[alone[0]][key][0])


def test_its_state_can_be_saved_and_loaded():
    model, x = parts()
    optimizer = Muon(model, model[1], torch.tensor(1e-2), fused=True, capturable=True)
    train(model, optimizer, x, 3)
    twin = copy.deepcopy(model)
    other = Muon(twin, twin[1], torch.tensor(1e-2), fused=True, capturable=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, x, 3)
    train(twin, other, x, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(),
                                                 strict=True))
