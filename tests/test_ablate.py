"""Ablations on a stage whose scores are known: ranking, seeds, failures, interruption."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import ROOT

from ups.ablate import main, plan, result
from ups.config import UsageError
from ups.files import lock_folder

SCRIPT = str(Path(__file__).parent / "ablated.py")


@pytest.fixture
def ablate(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `pytest &` ignores Ctrl-C
    yield lambda *flags: main([SCRIPT, "--out", str(tmp_path / "out"), *flags])
    signal.signal(signal.SIGINT, before)


def rows(tmp_path):
    lines = (tmp_path / "out" / "ablation.md").read_text().splitlines()
    return [[word.strip() for word in line.split("|")[1:-1]] for line in lines if line[0:1] == "|"]


def ends(tmp_path):
    """Status of every run."""
    return sorted(result(path.parent)["status"] for path in tmp_path.glob("out/*/log.txt"))


def starts(tmp_path):
    return [line for path in tmp_path.glob("out/*/toy/starts") for line in open(path)]


def test_cells_are_ranked_by_validation_with_mean_and_range_over_seeds(tmp_path, ablate, capsys):
    grid = "--grid", "lr=0.1,0.4", "kind=a", "sign=true", "--steps", "7"
    assert ablate(*grid, "--seeds", "2") == 0
    assert rows(tmp_path)[0] == ["lr", "seeds done", "val/nrmse_rollout"]  # kind does not differ
    assert rows(tmp_path)[2:] == [["0.4", "2 of 2", "0.015 [0.01, 0.02]"],
                                  ["0.1", "2 of 2", "0.045 [0.04, 0.05]"]]
    shown = capsys.readouterr().out
    assert "[4/4] lr=0.4 kind=a sign=true seed=1: val/nrmse_rollout 0.02" in shown
    assert "Validation split" in shown
    assert "the spread of seeds are noise.\n" in shown and "with one seed" not in shown
    assert ends(tmp_path) == ["done"] * len(starts(tmp_path)) == ["done"] * 4

    ablate(*grid, "--metric", "val/mine")
    shown = capsys.readouterr().out
    assert " begins" not in shown and "noise; with one seed it is unknown" in shown
    assert [row[0] for row in rows(tmp_path)] == ["lr", "---", "0.1", "0.4"]
    with pytest.raises(UsageError, match="--metric val/mime: .*toy has val/mine, val/nrmse_roll"):
        ablate(*grid, "--metric", "val/mime")


def test_other_data_and_several_numbers_are_other_cells():
    grid = SimpleNamespace(script=SCRIPT, grid=["tasks=a,b", "several=2 3"], seeds=1, out="out")
    cells = plan(grid, [])
    assert len({cell.run for cell in cells}) == 2
    assert cells[1].flags == ["--tasks", "b", "--several", "2", "3", "--seed", "0"]


def test_a_failing_cell_is_reported_and_the_others_go_on(tmp_path, ablate, capsys):
    assert ablate("--grid", "kind=b,c,a", "sign=false") == 1
    assert ends(tmp_path) == ["done", "failed", "failed"]
    shown = capsys.readouterr().out
    for line in ("kind=a sign=false seed=0: val", "kind=b sign=false seed=0: failed, on purpose (",
                 "kind=c sign=false seed=0: failed, c is not for today. (see"):
        assert line in shown
    configs = [json.loads(path.read_text()) for path in tmp_path.glob("out/*/toy/config.json")]
    assert [config["sign"] for config in configs] == [False, False]
    assert rows(tmp_path)[2][1] == "1 of 1" and rows(tmp_path)[-1][1] == "0 of 1"


def test_an_interrupted_ablation_goes_on_where_it_stopped(tmp_path, ablate):
    grid = ["--grid", "kind=a,s", "lr=0.1"]
    with pytest.raises(KeyboardInterrupt):
        ablate(*grid)
    assert ends(tmp_path) == ["done", "stopped"]
    assert ablate(*grid) == 0
    assert len(starts(tmp_path)) == 1 + 2  # the finished one was not started again
    assert ends(tmp_path) == ["done"] * 2


def test_two_ablations_in_one_folder_at_once_are_refused(tmp_path, ablate):
    held = lock_folder(tmp_path / "out", "--out")
    with held, pytest.raises(UsageError, match="one another --out"):
        ablate("--grid", "lr=0.1", "--steps", "2")
    assert not starts(tmp_path)


@pytest.mark.parametrize("flags, words", [
    (["--grid", "lrr=1,2"], "the nearest is --lr"),
    (["--grid", "lr=1,two"], "invalid float"),
    (["--grid", "lr"], "--grid lr: it is KEY=VALUE"),
    (["--grid", "lr=1", "lr=2"], "names each key once"),
    (["--grid", "lr=1", "--seeds", "0"], "--seeds is at least 1"),
    (["--grid", "kind=a,z"], "a, b, c or s"),
    (["--grid", "lr=1", "--stepps", "3"], "the nearest is --steps"),
    (["--grid", "seed=1,2"], "--seeds"), (["--grid", "lr=1", "--run", "x"], "--out"),
    (["--grid", "lr=1", "--lr", "2"], "--lr is in the --grid, too"),
    (["--grid", "lr=1", "--dry_run"], "a --dry_run trains nothing"),
    ([], "--grid"),
])
def test_wrong_use_is_one_sentence_before_anything_runs(tmp_path, ablate, flags, words):
    with pytest.raises(UsageError, match=words):
        ablate(*flags)
    assert not (tmp_path / "out").exists()


def test_a_script_that_is_none_is_refused():
    for name, words in (("nothing.py", "there is no script"), ("README.md", "there is no script"),
                        ("ups/files.py", "has no Config")):
        with pytest.raises(UsageError, match=words):
            main([str(ROOT / name), "--grid", "lr=1"])
