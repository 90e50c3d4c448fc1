import pytest

from ups.train.schedule import in_two_acts, up_and_down


def test_the_learning_rate_rises_to_one_and_falls_to_zero():
    factor = up_and_down(4, 12)
    assert [factor(k) for k in (0, 1, 3, 4)] == [0.25, 0.5, 1.0, 1.0]
    assert [factor(k) for k in (8, 11, 12, 13)] == [0.5, 0.125, 0.0, 0.0]
    assert up_and_down(0, 10)(0) == 1.0
    assert up_and_down(10, 5)(4) == 0.5  # a run shorter than its warm-up


def test_each_act_has_a_rise_and_a_fall_of_its_own():
    first, second = in_two_acts(2, 10, 16)
    assert [first(k) for k in (0, 2, 6, 10, 15)] == [0.5, 1.0, 0.5, 0.0, 0.0]
    assert [second(k) for k in (0, 9, 10, 12, 15)] == pytest.approx([0.0, 0.0, 0.5, 1.0, 0.25])
