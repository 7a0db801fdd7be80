"""What a histogram says is at most half too large, and survives merging and encoding."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastipc.histogram import Histogram

durations = st.lists(st.integers(0, 2**50), min_size=1, max_size=200)


def histogram(values):
    made = Histogram()
    for value in values:
        made.record(value)
    return made


@given(durations, st.floats(0, 100))
def test_a_percentile_is_at_most_half_above_the_true_one(values, percent):
    ordered = sorted(values)
    rank = max(1, -int(-len(ordered) * percent // 100))
    true = ordered[rank - 1] * 1e-9
    assert true * 0.999999 <= histogram(values).percentile(percent) <= true * 1.5 + 1e-15


@given(durations, durations)
def test_merging_is_counting_both(one, other):
    merged = Histogram.merged([histogram(one), Histogram(), histogram(other)])
    assert merged.to_builtins() == histogram(one + other).to_builtins()
    assert merged.summary() == histogram(one + other).summary()


@given(durations)
def test_it_travels_as_msgpack(values):
    made = histogram(values)
    back = Histogram.from_builtins(
        msgspec.msgpack.decode(msgspec.msgpack.encode(made.to_builtins()))
    )
    assert back.summary() == made.summary()
    assert list(back.buckets()) == list(made.buckets())
    assert list(back.buckets())[-1][1] == len(values)


def test_an_empty_one_says_zero():
    assert Histogram().summary()["max"] == 0.0
    assert Histogram().percentile(99) == 0.0
    with pytest.raises(ValueError, match="between 0 and 100"):
        Histogram().percentile(101)


def test_a_negative_duration_counts_as_none():
    made = histogram([-5, 7])
    assert (made.min_ns, made.max_ns, made.sum_ns, made.count) == (0, 7, 7, 2)
