"""One run that is killed again and again, each time in another way, and ends as if it never was.

Every death starts from the checkpoint that the one before left. After each: no process is left,
nothing is lost beyond the last checkpoint, all ranks had entered the same collectives.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import pytest
from launching import ROOT, Launch
from watching import SCRIPT, begin, ending, losses, one_order, play, ranks, saved

STEPS, FLAGS = 30, ("--steps", 30, "--save_every", 3, "--keep", 2)

# what happens: the scenario, and the checkpoint that must be the newest one afterwards
DEATHS = {
    "rank 1": ({"kill": "SIGKILL", "rank": 1, "step": 8}, 6),
    "save half": ({"kill": "SIGKILL", "rank": 0, "step": 9, "point": "half"}, 6),
    "save unnamed": ({"kill": "SIGKILL", "rank": 0, "step": 9, "point": "unnamed"}, 6),
    "save unpruned": ({"kill": "SIGKILL", "rank": 0, "step": 9, "point": "unpruned"}, 9),
    "worker": ({"worker": True, "workers": 1, "rank": 1, "step": 17}, 15),
    "Ctrl-C": ({"hold": True, "step": 19}, 19),
    "launcher SIGKILL": ({"hold": True, "step": 22}, 22),
}
STOPPED = {"Ctrl-C", "launcher SIGKILL"}


def die(folder, name, spec):
    """One launch that ends before its time; returns what is there afterwards."""
    place = folder / "run"
    for rank in (0, 1):
        (place / f"pid{rank}").unlink(missing_ok=True)
        (place / f"collectives{rank}.txt").unlink(missing_ok=True)
        (place / "toy" / f"held{rank}").unlink(missing_ok=True)
    launch = begin(folder, [{"name": "run", **spec}], *FLAGS, fresh=name == "Ctrl-C")
    if "hold" in spec:
        for rank in (0, 1):
            launch.wait_for(place / "toy" / f"held{rank}")
        if name == "Ctrl-C":
            control_c(launch.pid, *(int((place / f"pid{r}").read_text()) for r in (1, 0)))
        else:
            os.kill(launch.pid, signal.SIGKILL)
    launch.end()
    end = ending(place)
    kept = shutil.copytree(place / "toy", folder / f"after {name}")
    return {"launch": launch, "end": end, "saved": saved(place),
            "order": one_order(place, cut=True), "kept": kept}


def control_c(*pids):
    """As a terminal does it to all, while the launcher passes its own on, from a nervous hand."""
    for _ in range(3):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        time.sleep(0.1)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    seen = {name: die(folder, name, spec) for name, (spec, _) in DEATHS.items()}
    last = play(folder, [{"name": "run"}, {"name": "sound"}], *FLAGS)
    assert last.returncode == 0, last.stderr[-3000:]
    return folder / "run", seen


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_costs_at_most_what_came_after_the_checkpoint(chain, name):
    one = chain[1][name]
    assert one["launch"].returncode != 0, one["launch"].stderr[-3000:]
    assert one["order"]
    assert one["saved"][0] == DEATHS[name][1]
    if name in STOPPED:
        assert one["end"]["status"] == "stopped" and one["end"]["step"] == one["saved"][0]
        assert one["end"]["reason"].startswith(
            f"stopped by a signal at step {one['saved'][0]}; run the same command again")
        ours = re.escape(f'File "{ROOT}/') + r"(?!\.venv/)"
        assert not re.search(ours, one["launch"].stderr)  # no traceback of ours
        assert "monitoredBarrier" not in one["launch"].stderr
    elif "kill" in DEATHS[name][0]:
        killed = f"rank {DEATHS[name][0]['rank']} died by signal 9 (SIGKILL)"
        assert one["end"]["status"] == "failed" and one["end"]["reason"] == killed
        assert f"error: {killed}; run the same command again.\n" in one["launch"].stderr


def test_the_whole_ends_as_if_nothing_had_been(chain):
    place, sound = chain[0], chain[0].with_name("sound")
    assert [one["error"] for one in ranks(place)] == [None, None]
    assert [one["weights"] for one in ranks(place)] == [one["weights"] for one in ranks(sound)]
    assert losses(place) == losses(sound) and losses(place).keys() == set(range(1, STEPS + 1))
    assert ending(place)["status"] == "done" and not list(place.rglob("*.partial"))


def test_a_save_that_was_cut_is_seen_for_what_it_is(chain):
    names = {name: sorted(path.name for path in (one["kept"] / "checkpoints").iterdir())
             for name, one in chain[1].items()}
    assert names["save half"] == ["step_3", "step_6", "step_9.partial"]
    assert names["save unnamed"] == ["step_3", "step_6", "step_9.partial"]
    assert names["save unpruned"] == ["step_3", "step_6", "step_9"]
    assert names["Ctrl-C"] == ["step_18", "step_19"]


def test_a_fault_in_a_loader_is_the_reason_whichever_rank_had_it(chain):
    one = chain[1]["worker"]
    assert one["end"]["reason"].startswith("rank 1: KeyError: Caught KeyError in DataLoader")
    assert "no such window (put in by a test)" in one["end"]["reason"]
    assert "__getitems__" in one["launch"].stderr  # the original traceback
    assert one["end"]["status"] == "failed" and one["end"]["step"] == 15  # a batch is read ahead


@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_torchrun_starts_again_after_every_kill(tmp_path, count):
    """Without the variable, and under `accelerate launch --max_restarts`, which has no
    `--standalone`, the ranks of the next attempt find addresses of the last one, and fail."""
    done = Launch(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2,
                   "--max_restarts", count, "--", SCRIPT,
                   json.dumps([{"name": "run", "restarts": count}]), "--run", tmp_path,
                   "--steps", count + 6, "--save_every", 1],
                  env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}).end(600 + 40 * count)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("resuming from") == count
    assert [one["step"] for one in ranks(tmp_path / "run")] == [count + 6] * 2
    assert losses(tmp_path / "run").keys() == set(range(1, count + 7))
    assert ending(tmp_path / "run")["status"] == "done"
