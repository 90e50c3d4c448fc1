"""Faults that no process dies of: all ranks take the same decision, in one process group."""

import json

import pytest
from watching import ending, losses, one_order, play, ranks, saved

CELLS = ("forward", 0, 0), ("forward", 1, -1), ("backward", 0, -1), ("backward", 1, 0)
FLAGS = {"micro_batch": 2}


def cell(where, rank, micro):
    return f"{where}{rank}{'first' if micro == 0 else 'last'}"


SCENARIOS = [
    {"name": "sound"},
    *({"name": cell(*c), "oom": c[0], "rank": c[1], "micro": c[2], "flags": FLAGS} for c in CELLS),
    {"name": "twice", "oom": "backward", "rank": 1, "times": 2},
    {"name": "both", "oom": "forward", "times": 1},
    {"name": "everywhere", "oom": "forward", "times": 99},
    {"name": "everywhere", "oom": "none", "flags": FLAGS},
    {"name": "nan", "nan": True, "rank": 1, "step": 4},
    {"name": "nan_gradient", "nan_gradient": True, "rank": 1, "step": 6},
    {"name": "raises", "raises": "ValueError", "rank": 1, "step": 5},
    {"name": "usage", "raises": "UsageError", "rank": 1, "step": 5},
    *({"name": f"full{r}", "full": 3000, "rank": r, "step": 2, "until": 5} for r in (0, 1)),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    done = play(folder, SCENARIOS)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done


def same_curve(folder, name):
    reference, other = losses(folder / "sound"), losses(folder / name)
    assert reference.keys() == other.keys() == set(range(1, 9))
    assert abs(reference[1] - reference[8]) > 0.02
    return max(abs(reference[k] - other[k]) for k in reference) < 1e-9  # float64


@pytest.mark.parametrize("where, rank, micro", CELLS)
def test_out_of_memory_on_one_rank_splits_and_changes_nothing(played, where, rank, micro):
    folder, done = played
    name = cell(where, rank, micro)
    seen = ranks(folder / name)
    assert [one["micro_batch"] for one in seen] == [1, 1]  # adopted by both
    assert [one["splits"] for one in seen] == [1, 1]
    tries = 0 if micro == 0 else 2  # micro-batches of two rows that went well before the fault
    calls = [2] * 3 * 2 + [2] * (tries + 1) + [1] * 6 * 6
    other = [2] * 3 * 3 + [1] * 6 * 5
    assert seen[rank]["rows"] == calls and seen[1 - rank]["rows"] == other
    assert same_curve(folder, name)
    assert losses(folder / name, "train/oom_splits") == {k: 1 for k in range(3, 9)}
    assert f"rank {rank}: out of memory at step 3; going on with 1 rows at a time" in done.stderr


def test_it_may_happen_again_and_on_both_ranks(played):
    folder, _ = played
    for name, micro, splits in (("twice", 2, 2), ("both", 3, 1)):
        seen = ranks(folder / name)
        assert [one["micro_batch"] for one in seen] == [micro] * 2
        assert [one["splits"] for one in seen] == [splits] * 2
        assert same_curve(folder, name)


def test_out_of_memory_everywhere_is_bounded_and_the_next_launch_goes_on(played):
    """Six rows, three, two, one: then it is an error. A restart takes half of what failed."""
    folder, _ = played
    seen = ranks(folder / "everywhere")
    before = seen[0]["previous"]
    assert (before["status"], before["step"], before["micro_batch"]) == ("out_of_memory", 3, 1)
    assert "OutOfMemoryError: CUDA out of memory" in before["reason"]
    assert [one["error"] for one in seen] == [None, None]
    assert [one["micro_batch"] for one in seen] == [1, 1]  # though two were asked for
    assert same_curve(folder, "everywhere")


def test_a_loss_that_is_no_number_ends_both_ranks(played):
    folder, _ = played
    for one in ranks(folder / "nan"):
        assert one["error"].startswith("FloatingPointError: the loss is nan at step 4 (the last "
                                       "checkpoint is step 3)")
    assert ending(folder / "nan")["status"] == "failed" and saved(folder / "nan") == [3]


def test_weights_that_are_no_numbers_are_not_saved(played):
    """The loss of step 6 is still finite, and step 6 is one that saves."""
    folder, _ = played
    first, second = (one["error"] for one in ranks(folder / "nan_gradient"))
    assert first.startswith("FloatingPointError: the sum of all weights is nan at step 6")
    assert second.startswith("PeerFailed: the sum of all weights is nan at step 6")
    assert saved(folder / "nan_gradient") == [3]


@pytest.mark.parametrize("name, kind", [("raises", "ValueError"), ("usage", "UsageError")])
def test_another_exception_stops_all_with_its_reason(played, name, kind):
    folder, done = played
    first, second = (one["error"] for one in ranks(folder / name))
    assert first == "PeerFailed: another rank failed in this step; its own message says why."
    assert second == f"{kind}: put in by a test; no cure."
    end = ending(folder / name)
    assert end["status"] == "failed" and end["step"] == 5
    plain = kind == "UsageError"  # a sentence for the user, without the name of a class
    assert end["reason"] == f"rank 1: {second.removeprefix('UsageError: ') if plain else second}"
    assert saved(folder / name) == [3]
    if plain:
        assert done.stderr.count("error: rank 1: put in by a test") == 1


def test_a_disk_that_is_full_for_a_while(played):
    folder, done = played
    assert done.stderr.count("checkpoint at step 3 was not written") == 1  # the main process writes
    for rank, kept in ((0, [8, 6]), (1, [8, 6])):
        seen = ranks(folder / f"full{rank}")
        assert [one["error"] for one in seen] == [None, None]
        assert [one["last_saved"] for one in seen] == [8, 8]
        assert seen[0]["weights"] == seen[1]["weights"]
        assert saved(folder / f"full{rank}") == kept
        assert same_curve(folder, f"full{rank}")  # no line of the metrics is lost either
        assert not list((folder / f"full{rank}").rglob("*.partial"))


@pytest.mark.parametrize("name", dict.fromkeys(spec["name"] for spec in SCENARIOS))
def test_all_ranks_enter_the_same_collectives(played, name):
    assert one_order(played[0] / name)
    assert json.loads((played[0] / name / "rank0.json").read_text())["world"] == 2
