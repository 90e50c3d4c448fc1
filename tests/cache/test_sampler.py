"""Batch k depends on seed and k alone; tasks are balanced exactly; nothing repeats too early."""

from collections import Counter

from ups.cache.sampler import StepSampler


def sampler(**options):
    options = {"sizes": [37, 100, 11], "batch_size": 8, "steps": 60, "seed": 3} | options
    return StepSampler(**options)


def test_a_batch_is_a_function_of_seed_and_step():
    whole = list(sampler())
    assert len(whole) == len(sampler()) == 60
    assert list(sampler(start=17)) == whole[17:] and len(sampler(start=17)) == 43
    late = sampler()
    late.start = 59
    assert list(late) == whole[59:] and list(sampler(start=60)) == []
    assert sampler().batch(31) == whole[31]  # without the ones before it
    assert list(sampler(seed=4)) != whole
    for step, batch in enumerate(whole):
        assert [(k, row) for k, row, _ in batch] == [(step, row) for row in range(8)]


def test_a_batch_is_of_one_task_and_any_block_is_balanced():
    tasks = []
    for batch in sampler():
        task, = {task for _, _, (task, _) in batch}
        tasks.append(task)
    for first in range(60 - 3):
        counts = Counter(tasks[first:first + 3])
        assert [counts[task] for task in range(3)] == [1, 1, 1]
    orders = {tuple(next(iter(b))[2][0] for b in sampler(seed=seed, steps=3)) for seed in range(20)}
    assert len(orders) == 6  # the seed decides which task comes first


def test_windows_come_again_only_when_all_were_seen():
    sizes, seen = [37, 100, 11], {0: [], 1: [], 2: []}
    for batch in sampler(steps=300):
        for _, _, (task, window) in batch:
            seen[task].append(window)
    for task, windows in seen.items():
        size = sizes[task]
        rounds = [windows[i:i + size] for i in range(0, len(windows) - size + 1, size)]
        assert len(rounds) == 800 // size
        assert all(sorted(part) == list(range(size)) for part in rounds)
        assert rounds[0] != rounds[1] and rounds[0] != sorted(rounds[0])


def test_a_task_smaller_than_a_batch_goes_round():
    batch = sampler(sizes=[3], steps=1).batch(0)
    assert sorted(Counter(window for _, _, (_, window) in batch).values()) == [2, 3, 3]
