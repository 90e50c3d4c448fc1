"""What a copy of a script may forget is refused by name."""

import contextlib
import re
import types

import pytest
import torch
import toy
from torch import nn

from ups.config import UsageError, command
from ups.train.run import RunConfig
from ups.train.step import Backward


class Model(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(nn.Linear(3, 4), *layers, nn.Linear(4, 1))


def squares(model, batch):
    return model(batch["x"]).square().mean(1)


BATCH = {"x": torch.ones(6, 3), "rows": torch.arange(6), "step": 0, "task": 0}
WRONG = {
    "a tensor without rows": (
        Model(), squares, {"weight": torch.ones(3)},
        r"batch\['weight'\] has the shape \(3,\), and the batch has 6 rows: expand it"),
    "a number that changes": (Model(), squares, {"t": 0.5}, r"batch\['t'\] is a float"),
    "a mean": (Model(), lambda *given: squares(*given).mean(), {},
               r"the loss has the shape \(\) for 6 rows: return one value per row"),
    "a list": (Model(), lambda *given: [squares(*given)], {}, "the loss has no tensor for 6 rows"),
    "statistics": (Model(nn.BatchNorm1d(4)), squares, {},
                   "the model changes its buffer 1.num_batches_tracked in training"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_copy_may_forget_is_refused_by_name(name):
    model, loss, more, words = WRONG[name]
    accelerator = types.SimpleNamespace(
        num_processes=1, device=torch.device("cpu"), distributed_type=None, process_index=0,
        no_sync=lambda model: torch.enable_grad(), backward=lambda loss: loss.backward())
    run = types.SimpleNamespace(accelerator=accelerator, cfg=RunConfig(run="x"), graphs=False,
                                agree=types.SimpleNamespace(share=lambda *given: None, late=False,
                                                            read=list),
                                stop_requested=False, stopping=False, step=1)
    with pytest.raises(UsageError, match=words):
        Backward(run, model, loss)(BATCH | more)
    Backward(run, Model(nn.GroupNorm(2, 4)), squares)(BATCH)  # nothing is wrong with this


@pytest.mark.parametrize("change, words", [
    ("resume", r"error: call run.resume\(model, .*\) before run.progress"),
    ("backward", r"error: a step took no gradients from Backward: call `backward\(batch\)`"),
    ("randn", r"step 1 drew from torch's own generator, as torch.randn and dropout do"),
    ("", "^(?!.*own generator)")])
def test_what_a_loop_may_forget(change, words, tmp_path, monkeypatch, capsys):
    loss = toy.loss
    if change == "resume":
        monkeypatch.setattr(toy.Run, "resume", lambda *given, built_on: None)
    if change == "backward":
        monkeypatch.setattr(toy.Backward, "__call__", lambda self, batch: torch.zeros(()))
    if change == "randn":
        monkeypatch.setattr(toy, "loss", lambda *given: loss(*given) * torch.rand(1))
    with contextlib.suppress(SystemExit):
        command(lambda: toy.main(["--run", str(tmp_path), "--steps", "2"]))
    assert re.search(words, capsys.readouterr().err, re.S)
