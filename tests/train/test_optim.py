"""Muon against the singular value decomposition, AdamW beside it, the learning rate."""

import copy

import pytest
import torch
from torch import nn

from ups.train.optim import AdamW, Muon, orthogonal, set_lr, warmup_then_linear
from ups.train.step import CudaGraphed


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
    optimizer = Muon(model, 1e-2, weight_decay=0.1)
    before = copy.deepcopy(model)
    plain = torch.optim.AdamW(before.parameters(), 1e-2, weight_decay=0.1)
    train(before, plain, x, 1)
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, x, 1)
    for i, (a, b) in enumerate(zip(model.parameters(), before.parameters(), strict=True)):
        assert torch.allclose(a, b) == (i != 2), i  # the third is the hidden matrix
    grad = model[1].weight.grad
    expected = start[2] * (1 - 1e-2 * 0.1) - 0.2 * 1e-2 * orthogonal([grad])[0]
    assert torch.allclose(model[1].weight, expected)


def test_what_has_no_gradient_stands_still():
    """A matrix and a bias for each of two tasks, in turns: each is as if it had been alone."""
    def weights(count):
        model = nn.ParameterList(torch.ones(shape) for _ in range(count)
                                 for shape in ((8, 9), (4,)))
        model.hidden = nn.ParameterList(model)
        return model

    together, alone = weights(2), weights(1)
    both, one = (Muon(m, 0.1, weight_decay=0.1) for m in (together, alone))
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


def test_compiled_updates_are_the_same(monkeypatch, traced):
    """As they are inside of a CUDA graph."""
    model, x = parts()
    twin = copy.deepcopy(model)
    train(model, Muon(model, 1e-2), x, 3)
    monkeypatch.setattr(CudaGraphed, "running", True)
    train(twin, Muon(twin, 1e-2), x, 3)
    assert all(torch.allclose(a, b, atol=1e-12)
               for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_learning_rate_rises_to_one_and_falls_to_zero():
    factor = [warmup_then_linear(step, 4, 12) for step in range(1, 15)]
    assert factor[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [factor[k] for k in (8, 11, 12, 13)] == [0.5, 0.125, 0.0, 0.0]
    assert warmup_then_linear(1, 0, 10) == 1.0
    assert warmup_then_linear(5, 10, 5) == 0.5  # a run shorter than its warm-up


@pytest.mark.parametrize("kind", [torch.optim.SGD, AdamW])
def test_a_learning_rate_reaches_every_weight(kind):
    model, _ = parts()
    optimizer = kind([{"params": part.parameters()} for part in model], 1e-2)
    known = optimizer.param_groups[1]["lr"]
    assert set_lr(optimizer, 0.5) == 0.5
    assert all(group["lr"] == 0.5 for group in optimizer.param_groups)
    assert kind is not AdamW or known == 0.5  # the tensor that a CUDA graph knows
