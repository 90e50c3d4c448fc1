"""Automatic restart is torchrun's own: a rank is killed, all start again, the run goes on.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node 2 --max_restarts 20

Without the variable, and under `accelerate launch --max_restarts`, which has no `--standalone`, the
ranks of the next attempt find addresses of the last one in a store that lives on, and fail.
"""


import pytest
from watching import ending, losses, play, ranks

FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_every_kill_is_followed_by_a_restart_that_recovers(tmp_path, count):
    done = play(tmp_path, [{"name": "run", "restarts": count}], "--steps", count + 6,
                "--save_every", 1, seconds=60 + 40 * count, env=FRESH_STORE,
                torchrun=("--standalone", "--nproc_per_node", "2", "--max_restarts", str(count)))
    assert done.code == 0, done.err[-3000:]
    assert done.out.count("resuming from") == count
    assert [one["step"] for one in ranks(tmp_path / "run")] == [count + 6] * 2
    assert losses(tmp_path / "run").keys() == set(range(1, count + 7))
    assert ending(tmp_path / "run")["status"] == "done"


@pytest.mark.soak
def test_two_hundred_steps_under_random_faults(tmp_path):
    """Memory runs out anywhere, the disk is full now and then; the curve is that of a sound run."""
    flags = ("--steps", 200, "--save_every", 5)
    done = play(tmp_path, [{"name": "sound"}, {"name": "random", "seed": 1}], *flags, seconds=400)
    assert done.code == 0, done.err[-3000:]
    sound, random = losses(tmp_path / "sound"), losses(tmp_path / "random")
    assert sound.keys() == random.keys() == set(range(1, 201))
    assert max(abs(sound[k] - random[k]) for k in sound) < 1e-9
    seen = ranks(tmp_path / "random")
    assert seen[0]["splits"] == seen[1]["splits"] > 20
    assert seen[0]["last_saved"] == seen[1]["last_saved"]
    assert "was not written" in done.err
