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


def test_zeros_around_matrices_change_nothing():
    """They put matrices of several shapes into one stack, as on a GPU."""
    shapes = (8, 12), (12, 4), (6, 4, 3, 3), (2, 3, 8, 10), (130, 140), (130, 200), (600, 130)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for alone, stacked in zip(orthogonal(tensors, padded=False), orthogonal(tensors, padded=True),
                              strict=True):
        torch.testing.assert_close(stacked, alone, rtol=0, atol=1e-9)


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
    optimizer = Muon(model, model[1], lr, weight_decay=0.1)
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


def test_slow_matrices_take_a_quarter_of_a_step():
    model, x = parts()
    twin = copy.deepcopy(model)
    start = model[1].weight.detach().clone()
    for m, slow in ((model, None), (twin, twin[1])):
        lr = torch.tensor(1e-2)
        train(m, Muon(m, m, lr, slow=slow, weight_decay=0.0), x, 1)
    assert torch.allclose(twin[1].weight - start, (model[1].weight - start) / 4)
    assert (model[1].weight - start).abs().max() > 1e-3
    assert all(torch.allclose(model[i].weight, twin[i].weight) for i in (0, 2))


def test_what_has_no_gradient_stands_still():
    """A matrix and a bias for each of two tasks, in turns: each is as if it had been alone."""
    def weights(count):
        return nn.ParameterList(torch.ones(shape) for _ in range(count) for shape in ((8, 9), (4,)))

    together, alone = weights(2), weights(1)
    both, one = (Muon(m, m, torch.tensor(0.1), weight_decay=0.1) for m in (together, alone))
    grads = [(torch.randn(8, 9), torch.randn(4)) for _ in range(3)]
    for step in range(6):
        own = list(together)[2 * (step % 2):][:2]
        before = [p.detach().clone() for p in together]
        both.zero_grad()
        for p, grad in zip(own, grads[step // 2], strict=True):
            p.grad = grad.clone()
        both.step()
        moved = [not torch.equal(p, q) for p, q in zip(together, before, strict=True)]
        assert moved == [step % 2 == 0] * 2 + [step % 2 == 1] * 2
    for pair in grads:
        for p, grad in zip(alone, pair, strict=True):
            p.grad = grad.clone()
        one.step()
    for start in (0, 2):
        assert all(torch.equal(p, q) for p, q in zip(list(together)[start:][:2], alone,
                                                     strict=True))


def test_compiled_updates_are_the_same():
    model, x = parts()
    twin = copy.deepcopy(model)
    for m, compiled in ((model, False), (twin, True)):
        train(m, Muon(m, m, torch.tensor(1e-2), slow=m[1], compile=compiled), x, 3)
    assert all(torch.allclose(a, b, atol=1e-12)
               for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_its_state_can_be_saved_and_loaded():
    model, x = parts()
    optimizer = Muon(model, model[1], torch.tensor(1e-2))
    train(model, optimizer, x, 3)
    twin = copy.deepcopy(model)
    other = Muon(twin, twin[1], torch.tensor(1e-2))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, x, 3)
    train(twin, other, x, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(),
                                                 strict=True))
