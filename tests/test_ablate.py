"""Ablations on a stage whose scores are known: ranking, seeds, failures, interruption."""

import json
import math
import signal
from pathlib import Path

import pytest
from launching import ROOT

import ups.ablate
from ups.ablate import main, result
from ups.config import UsageError
from ups.files import lock_folder

SCRIPT = str(Path(__file__).parent / "ablated.py")


@pytest.fixture
def ablate(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `pytest &` ignores Ctrl-C
    yield lambda *flags: main([SCRIPT, "--out", str(tmp_path / "out"), *flags])
    signal.signal(signal.SIGINT, before)


def ends(tmp_path):
    """Status of every run."""
    return sorted(result(path.parent)["status"] for path in tmp_path.glob("out/*/log.txt"))


def starts(tmp_path):
    return [line for path in tmp_path.glob("out/*/toy/starts") for line in open(path)]


def test_cells_are_ranked_by_validation_with_mean_and_range_over_seeds(tmp_path, ablate, capsys):
    assert ablate("--grid", "lr=0.1,0.4", "kind=a", "--seeds", "3", "--steps", "7") == 0
    table = (tmp_path / "out" / "ablation.md").read_text().splitlines()
    assert [word.strip() for word in table[0].split("|")[1:5]] == [
        "lr", "seeds done", "val/nrmse_rollout", "test nrmse_rollout"]  # kind does not differ
    first, second = ([word.strip() for word in line.split("|")[1:5]] for line in table[2:4])
    assert first == ["0.4", "3 of 3", "0.02 [0.01, 0.03]", "1.02 [1.01, 1.03]"]
    assert second == ["0.1", "3 of 3", "0.05 [0.04, 0.06]", "1.05 [1.04, 1.06]"]
    shown = capsys.readouterr().out
    assert "[6/6] lr=0.4 kind=a seed=2: val/nrmse_rollout 0.03, test 1.03" in shown
    assert table[0] in shown and "with one seed that spread is unknown" in shown
    assert ends(tmp_path) == ["done"] * len(starts(tmp_path)) == ["done"] * 6
    ablate("--grid", "lr=0.1,0.3", "kind=a", "--steps", "7")  # one is new
    assert capsys.readouterr().out.count(" begins") == 1 and len(starts(tmp_path)) == 7
    ablate("--grid", "lr=0.1", "kind=a", "--steps", "8")  # another configuration
    assert len(starts(tmp_path)) == 8


def test_a_value_may_be_several_numbers(tmp_path, ablate):
    assert ablate("--grid", "several=1 2,3", "--steps", "2") == 0
    stored = [json.loads(path.read_text())["several"]
              for path in tmp_path.glob("out/*/toy/config.json")]
    assert sorted(stored, key=str) == [3, [1, 2]]


def test_a_failing_cell_is_reported_and_the_others_go_on(tmp_path, ablate, capsys):
    assert ablate("--grid", "kind=b,c,a", "sign=true,false") == 1
    assert ends(tmp_path) == ["done", "done", "failed", "failed", "failed", "failed"]
    shown = capsys.readouterr().out
    for line in ("kind=a sign=false seed=0: val", "kind=b sign=true seed=0: failed, on purpose (",
                 "kind=c sign=false seed=0: failed, c is not for today. (see"):
        assert line in shown
    configs = [json.loads(path.read_text()) for path in tmp_path.glob("out/*/toy/config.json")]
    assert sorted(config["sign"] for config in configs) == [False, False, True, True]
    last = (tmp_path / "out" / "ablation.md").read_text().splitlines()
    assert "1 of 1" in last[2] and "0 of 1" in last[-3]


def test_an_interrupted_ablation_goes_on_where_it_stopped(tmp_path, ablate):
    grid = ["--grid", "kind=a,s", "lr=0.1,0.2"]
    with pytest.raises(KeyboardInterrupt):
        ablate(*grid)
    assert ends(tmp_path) == ["done", "done", "stopped"]
    with pytest.raises(KeyboardInterrupt):
        ablate(*grid)
    assert ablate(*grid) == 0
    assert len(starts(tmp_path)) == 2 + 2 + 2  # finished ones were not started again
    assert ends(tmp_path) == ["done"] * 4


def test_runs_that_there_are_make_one_table(tmp_path, ablate, capsys):
    ablate("--grid", "lr=0.1,0.4", "--steps", "2")
    runs = [str(path.parent.parent) for path in tmp_path.glob("out/*/toy/exit.json")]
    capsys.readouterr()
    assert main(["--compare", *runs]) == 0
    shown = capsys.readouterr().out
    first, second = ([word.strip() for word in line.split("|")[1:-1]]
                     for line in shown.splitlines()[2:4])
    assert ("0.4" in first and first[-3:] == ["1 of 1", "0.01", "1.01"] and second[-2] == "0.04")
    assert "below the spread of seeds are noise" in shown
    with pytest.raises(UsageError, match="holds no stage"):
        main(["--compare", str(tmp_path / "nothing")])


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
    (["--grid", "seed=1,2"], "--seeds"),
    (["--grid", "lr=1", "--run", "x"], "--out"),
    ([], "with its values"),
])
def test_wrong_use_is_one_sentence_before_anything_runs(tmp_path, ablate, flags, words):
    with pytest.raises(UsageError, match=words):
        ablate(*flags)
    assert not (tmp_path / "out").exists()
    for name in ("nothing.py", str(ROOT / "README.md")):
        with pytest.raises(UsageError, match="there is no such script"):
            main([name, "--grid", "lr=1"])


def test_the_test_score_is_of_the_same_quantity_as_validation(tmp_path):
    for task, expected in (({"nrmse_grid": 0.5}, 0.5), ({"crps": 0.25}, 0.25),
                           ({"scores": {"operator": {"crps": [2.0, 4.0]}, "p": {"crps": [1, 1]},
                                        "d": {"crps": [1.0, 1.0]}}}, (0.5 + 0.25) / 2)):
        (tmp_path / "test.json").write_text(json.dumps({"tasks": {"one": task, "two": task}}))
        assert ups.ablate.test_score(tmp_path / "test.json") == expected
    tasks = {name: {"nrmse_rollout": {"operator": error}} for name, error in (("a", 8), ("b", 2))}
    (tmp_path / "test.json").write_text(json.dumps({"tasks": tasks}))
    assert ups.ablate.test_score(tmp_path / "test.json") == 4.0  # as validation: the geometric mean
    assert math.isnan(ups.ablate.test_score(tmp_path / "nothing.json"))
