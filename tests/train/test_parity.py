"""The number of processes and the micro-batch change only the speed; a resume changes nothing."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy
from launching import start
from safetensors.torch import load_file
from watching import losses

from ups.config import UsageError
from ups.train import run

TOY = Path(__file__).parent / "toy.py"


def weights(folder, rank=0):
    tensors = load_file(folder / f"rank{rank}.safetensors")
    return {name: t for name, t in tensors.items() if name.startswith(("model/", "ema/"))}


def gap(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same training on 1, 2 and 3 processes, each with several micro-batches."""
    folders = {world: tmp_path_factory.mktemp(f"world{world}") for world in (1, 2, 3)}
    begun = {world: start(TOY, "--run", folders[world], "--variants", *variants, processes=world,
                          fresh=world == 2) for world, variants in ((2, (0, 3)), (3, (0, 1)))}
    toy.main(["--run", str(folders[1]), "--variants", "0", "3", "6"])
    for world, launch in begun.items():
        assert launch.end().returncode == 0, launch.stderr
        recorded = load_file(folders[world] / "micro0" / "rank0.safetensors")["world"]
        assert recorded == world
        (folders[world] / "stdout").write_text(launch.stdout)
    return folders


@pytest.mark.parametrize("world, micro", [(1, 3), (1, 6), (2, 0), (2, 3), (3, 0), (3, 1)])
def test_processes_and_micro_batches_do_not_change_the_weights(runs, world, micro):
    reference, other = runs[1] / "micro0", runs[world] / f"micro{micro}"
    moved = weights(reference)
    assert max(float(t.abs().max()) for t in moved.values()) > 1e-3
    assert gap(moved, weights(other)) < 1e-9
    expected, got = losses(reference), losses(other)
    assert expected.keys() == got.keys() == set(range(1, 9))
    assert max(abs(expected[k] - got[k]) for k in expected) < 1e-9


def test_ranks_see_disjoint_rows_of_one_global_batch(runs):
    whole = load_file(runs[1] / "micro0" / "rank0.safetensors")["seen"]  # (steps, batch)
    for world in (2, 3):
        parts = [load_file(runs[world] / "micro0" / f"rank{r}.safetensors")["seen"]
                 for r in range(world)]
        for step in range(len(whole)):
            rows = [set(part[step].tolist()) for part in parts]
            assert sum(map(len, rows)) == len(set.union(*rows)) == 12
            assert set.union(*rows) == set(whole[step].tolist())


def test_no_thread_of_a_process_group_outlives_the_command(runs):
    """One that still holds a tensor when Python ends aborts the process after a good run."""
    printed = (runs[2] / "stdout").read_text()
    assert printed.count(" at exit: ") == 2 and "gloo" not in printed


def test_resume_cut_anywhere_is_bit_for_bit(runs, tmp_path):
    """Every cut of an eight-step run: the checkpoint of that step is the only one."""
    toy.main(["--run", str(tmp_path / "whole"), "--save_every", "1", "--keep", "9"])
    (tmp_path / "whole/micro0/toy/exit.json").unlink()
    for cut in range(1, 8):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"cut{cut}") / "micro0"
        for path in (folder / "toy" / "checkpoints").iterdir():
            if path.name != f"step_{cut}":
                shutil.rmtree(path)
        toy.main(["--run", str(folder.parent)])
        assert gap(weights(runs[1] / "micro0"), weights(folder)) == 0.0
        steps = re.findall(r'"step": (\d+)', (folder / "toy" / "metrics.jsonl").read_text())
        assert steps == list("12345678")  # none twice, none missing


def test_an_indivisible_batch_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "make_accelerator", lambda timeout: SimpleNamespace(num_processes=2))
    with pytest.raises(UsageError, match="13 is not divisible by 2 processes; the nearest that "
                                         "are: 12 or 14"):
        toy.main(["--run", str(tmp_path), "--batch_size", "13"])
    assert not list(tmp_path.iterdir())
