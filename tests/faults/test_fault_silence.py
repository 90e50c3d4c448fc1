"""Ranks that cannot agree any more: one sleeps for ever, or fails inside FSDP2's collectives."""

import json

import pytest
import toy
from watching import ending, one_order, play, ranks, saved

LIMIT = 6  # seconds: --timeout


DEEP = pytest.param(0, "deep", "", marks=pytest.mark.soak)  # the launcher waits 30 s, then kills


@pytest.mark.parametrize("rank, sleep, strategy", [(0, "light", ""), (1, "light", "_fsdp"), DEEP])
def test_a_rank_that_stops_answering_is_named(tmp_path, rank, sleep, strategy):
    spec = {"name": "run", "sleep": sleep, "rank": rank, "step": 5}
    env = {"SHARDED": "1"} if strategy else {}
    done = play(tmp_path, [spec], "--timeout", LIMIT, env=env, config=f"2gpu{strategy}.yaml")
    assert done.returncode != 0
    end = ending(tmp_path / "run")
    assert end["status"] == "failed" and end["step"] == 5
    assert end["reason"].startswith(f"rank {1 - rank}: "), end
    assert f"rank {rank}" in end["reason"].lower().replace("ranks", "rank").split(": ", 1)[1]
    line, = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"rank {rank}" in line.lower().replace("ranks", "rank")
    assert line.endswith("; run the same command again.")
    assert saved(tmp_path / "run") == [3]
    assert one_order(tmp_path / "run", cut=True)


def test_a_rank_that_stands_still_while_it_saves_is_named(tmp_path):
    spec = {"name": "run", "kill": "SIGSTOP", "rank": 0, "step": 6, "point": "half"}
    done = play(tmp_path, [spec], "--timeout", LIMIT, env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"})
    assert done.returncode != 0 and done.seconds < 120
    end = ending(tmp_path / "run")
    assert (end["status"], end["step"]) == ("failed", 6) and saved(tmp_path / "run") == [3]
    assert end["reason"] == ("rank 1: rank 0 does not answer after 10 s; run the same command "
                             "again.")
    assert f"error: {end['reason'].split(': ', 1)[1]}" in done.stderr.splitlines()


def test_out_of_memory_under_fsdp_fails_at_once_and_a_restart_takes_half(tmp_path):
    spec = {"name": "micro0", "oom": "forward", "rank": 1, "step": 5}
    done = play(tmp_path, [spec], "--timeout", 280, env={"SHARDED": "1"}, config="2gpu_fsdp.yaml")
    assert done.returncode != 0 and done.seconds < 200, done.stderr[-3000:]
    end = ending(tmp_path / "micro0")
    assert (end["status"], end["step"], end["micro_batch"]) == ("out_of_memory", 5, 6)
    assert end["reason"].startswith("rank 1: torch.OutOfMemoryError: CUDA out of memory")
    first, second = ranks(tmp_path / "micro0")
    assert second["error"].startswith("OutOfMemoryError") and second["rows"] == [6] * 5
    assert "OutOfMemoryError" not in first["error"]  # it lost its connection
    assert saved(tmp_path / "micro0") == [3]
    toy.main(["--run", str(tmp_path)])  # one process goes on from what two saved
    state = tmp_path / "micro0" / "toy" / "checkpoints" / "step_8" / "state.json"
    assert json.loads(state.read_text())["micro_batch"] == 3
    assert ending(tmp_path / "micro0")["status"] == "done"
