"""On GPUs the ranks read a step late what they said: nothing of a failed step may be kept.

Two CPU processes play it, without the asynchrony. A step that is neither logged, validated nor
saved is the one after which the others do not know yet.
"""

from pathlib import Path

import pytest
from watching import ending, losses, one_order, play, ranks, saved

SCENARIOS = [
    {"name": "sound"},
    {"name": "oom", "oom": "backward", "rank": 1, "step": 4, "times": 2},
    {"name": "both", "oom": "forward", "step": 4},
    {"name": "unseen", "raises": "ValueError", "rank": 1, "step": 4},
    {"name": "saving", "raises": "ValueError", "rank": 0, "step": 6},
    {"name": "last", "raises": "ValueError", "rank": 1, "step": 8},
    {"name": "stop", "kill": "SIGTERM", "rank": 1, "step": 4},
]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late")
    play(folder, SCENARIOS, "--log_every", 3, script=Path(__file__).with_name("late.py"))
    return folder


def test_memory_that_ran_out_is_known_to_all_before_the_next_step(played):
    for name, rows in (("oom", [[6] * 4 + [2] * 12, [6] * 4 + [3] + [2] * 15]),
                       ("both", [[6] * 4 + [3] * 10] * 2)):
        seen = ranks(played / name)
        assert [one["rows"] for one in seen] == rows
        assert [one["micro_batch"] for one in seen] == [rows[0][-1]] * 2
        assert [one["splits"] for one in seen] == [2 if name == "oom" else 1] * 2
        reference, other = losses(played / "sound"), losses(played / name)
        assert reference.keys() == other.keys() == {3, 6, 8}
        assert max(abs(reference[k] - other[k]) for k in reference) < 1e-9


@pytest.mark.parametrize("name, failed, told, kept", [
    ("unseen", 4, 5, [3]), ("saving", 6, 6, [3]), ("last", 8, 8, [6, 3])])
def test_a_step_in_which_a_rank_failed_is_never_kept(played, name, failed, told, kept):
    seen = sorted(ranks(played / name), key=lambda one: one["error"])
    assert [one["error"].partition(":")[0] for one in seen] == ["PeerFailed", "ValueError"]
    assert [one["step"] for one in seen] == [told, failed]
    assert saved(played / name) == kept and max(losses(played / name)) < failed
    assert ending(played / name)["reason"].endswith("ValueError: put in by a test; no cure.")


def test_a_stop_is_agreed_a_step_later(played):
    assert ending(played / "stop")["reason"].startswith("stopped by a signal at step 5;")
    assert saved(played / "stop") == [5, 3]


@pytest.mark.parametrize("name", [spec["name"] for spec in SCENARIOS])
def test_all_ranks_enter_the_same_collectives(played, name):
    assert one_order(played / name, cut=True)
