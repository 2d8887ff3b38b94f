import re

import pytest

from torchsbp.sampling.schedules import Milestones, check_ratio, over_depth, ramp, validate


def test_a_number_is_repeated_over_depth():
    assert over_depth(0.5, 3) == (0.5, 0.5, 0.5)


def test_a_pair_is_the_papers_linear_increase():
    ratios = over_depth((0.25, 0.75), 8)
    assert [round(r, 2) for r in ratios] == [0.25, 0.32, 0.39, 0.46, 0.54, 0.61, 0.68, 0.75]


def test_a_pair_may_decrease():
    assert over_depth((0.75, 0.25), 3) == (0.75, 0.5, 0.25)


def test_an_equal_pair_is_uniform_to_the_last_bit():
    assert set(over_depth((0.3, 0.3), 12)) == {0.3}


@pytest.mark.parametrize("depth", range(2, 30))
def test_the_ends_of_a_pair_are_exact(depth):
    ratios = over_depth((0.1, 1.0), depth)
    assert (ratios[0], ratios[-1]) == (0.1, 1.0)


def test_one_block_gets_the_end_of_a_pair():
    assert over_depth((0.25, 0.75), 1) == (0.75,)


@pytest.mark.parametrize("ratios", [[0.2], [0.2, 0.9], [0.2, 0.9, 0.4]])
def test_a_list_of_the_right_length_is_itself(ratios):
    assert over_depth(ratios, len(ratios)) == tuple(ratios)


def test_a_list_of_the_wrong_length_says_found_and_needed():
    text = "keep_ratio lists 3 ratios for 8 SBP blocks; give 8 of them, a pair (first, last), or one number"
    with pytest.raises(ValueError, match=re.escape(text)):
        over_depth([0.2, 0.3, 0.4], 8)


def test_depth_must_be_positive():
    with pytest.raises(ValueError, match="depth must be at least 1, found 0"):
        over_depth(0.5, 0)


@pytest.mark.parametrize("value", [1, 1.0, 0.5, 1e-9])
def test_ratios_in_the_interval_become_floats(value):
    assert check_ratio(value) == value
    assert type(check_ratio(value)) is float


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), float("inf"), -float("inf")])
def test_ratios_outside_the_interval_are_refused(value):
    with pytest.raises(ValueError, match=re.escape(f"keep_ratio must be a number in (0, 1], found {value!r}")):
        check_ratio(value)


@pytest.mark.parametrize("value", ["half", True, False, None, 1j])
def test_what_is_not_a_real_number_is_refused(value):
    text = f"keep_ratio must be a number in (0, 1], found {value!r} of type {type(value).__name__}"
    with pytest.raises(TypeError, match=re.escape(text)):
        check_ratio(value)


@pytest.mark.parametrize(
    "given, normal",
    [(1, 1.0), (0.5, 0.5), ([0.25, 1], (0.25, 1.0)), ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3))],
)
def test_validate_normalises_to_floats_and_tuples(given, normal):
    assert repr(validate(given)) == repr(normal)


def test_validate_keeps_milestones():
    schedule = Milestones(((0, 0.5),))
    assert validate(schedule) is schedule


def test_validate_names_the_wrong_element():
    with pytest.raises(ValueError, match=re.escape("keep_ratio[1] must be a number in (0, 1], found 2")):
        validate([0.5, 2])


def test_validate_refuses_an_empty_list():
    with pytest.raises(ValueError, match="keep_ratio is empty; give a number"):
        validate([])


def test_milestones_are_piecewise_constant():
    schedule = Milestones(((0, 0.25), (10, (0.25, 0.75)), (20, 1)))
    expected = {0: 0.25, 9: 0.25, 10: (0.25, 0.75), 19: (0.25, 0.75), 20: 1.0, 10**9: 1.0}
    assert {step: schedule.at(step) for step in expected} == expected


def test_milestones_from_lists_equal_those_from_tuples_and_hash():
    assert Milestones([[0, [0.5, 1]]]) == Milestones(((0, (0.5, 1.0)),))  # type: ignore[arg-type]
    assert hash(Milestones(((0, 0.5),))) == hash(Milestones(((0, 0.5),)))


@pytest.mark.parametrize(
    "points, error, text",
    [
        ((), ValueError, "must start at 0 and increase strictly, found []"),
        (((1, 0.5),), ValueError, "must start at 0 and increase strictly, found [1]"),
        (
            ((0, 0.5), (5, 0.6), (5, 0.7)),
            ValueError,
            "must start at 0 and increase strictly, found [0, 5, 5]",
        ),
        (
            ((0, 0.5), (5, 0.6), (3, 0.7)),
            ValueError,
            "must start at 0 and increase strictly, found [0, 5, 3]",
        ),
        (((0, 0.5), (1.5, 0.6)), TypeError, "the steps of points must be integers, found [0, 1.5]"),
        ((0, 0.5), TypeError, "points must be (step, ratio) pairs, found (0, 0.5)"),
        (((0, 0.5), (7, 0)), ValueError, "ratio at step 7 must be a number in (0, 1], found 0"),
        (((0, 0.5), (7, (0.5, 3))), ValueError, "ratio at step 7[1] must be a number in (0, 1], found 3"),
        (
            ((0, Milestones(((0, 0.5),))),),
            TypeError,
            "ratio at step 0 must be a number in (0, 1], found Mile",
        ),
    ],
)
def test_milestones_refuse(points, error, text):
    with pytest.raises(error, match=re.escape(text)):
        Milestones(points)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step must be at least 0, found -1"):
        Milestones(((0, 0.5),)).at(-1)


def test_ramp_is_a_staircase_of_equal_jumps_that_ends_at_stop():
    assert ramp(0.5, steps=100).points == ((0, 0.5), (25, 0.625), (50, 0.75), (75, 0.875), (100, 1.0))


def test_ramp_waits_until_begin():
    assert ramp(0.75, 0.25, steps=7, begin=10, levels=2).points == ((0, 0.75), (13, 0.5), (17, 0.25))


@pytest.mark.parametrize("options", [{"steps": 3}, {"steps": 9, "levels": 0}, {"steps": 9, "begin": -1}])
def test_ramp_refuses_impossible_stairs(options):
    with pytest.raises(ValueError, match=r"a ramp needs levels >= 1, steps >= levels and begin >= 0, found levels="):
        ramp(0.5, **options)


def test_ramp_names_the_wrong_end():
    with pytest.raises(ValueError, match=re.escape("stop must be a number in (0, 1], found 1.5")):
        ramp(0.5, 1.5, steps=10)
