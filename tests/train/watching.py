"""Launch faulty.py on two real processes, and read what they left."""

import json

from launching import TESTS, start

from ups.train.checkpoint import checkpoints, damage, step_of

SCRIPT = TESTS / "faults" / "faulty.py"


def begin(folder, specs, *flags, script=SCRIPT, **options):
    return start(script, json.dumps(specs), "--run", folder, *flags, **options)


def play(folder, specs, *flags, **options):
    return begin(folder, specs, *flags, **options).end()


def ranks(folder):
    """What each rank wrote down at its end; there were two of them."""
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["world"] for one in seen] == [2, 2]
    return seen


def one_order(folder, cut=False):
    """All ranks entered the same collectives; one that died may lack the end of the list."""
    lines = [(folder / f"collectives{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    length = min(map(len, lines))
    assert length and cut or ({len(one) for one in lines} == {length} and length > 8)
    assert all(one[:length] == lines[0][:length] for one in lines)
    return True


def ending(folder):
    path = folder / "toy" / "exit.json"
    return json.loads(path.read_text()) if path.exists() else None


def losses(folder, key="train/loss"):
    lines = map(json.loads, (folder / "toy" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def saved(folder):
    """Steps of the sound checkpoints, newest first."""
    return [step_of(c) for c in checkpoints(folder / "toy" / "checkpoints") if damage(c) is None]
