"""Hypothesis strategies for learning-rate schedules."""

from hypothesis import strategies as st
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule, PolynomialDecay

from kdpkit import scaling
from kdpkit import schedules as kinds

RATES = st.floats(0.01, 1.0)


def schedules(max_steps: int = 20) -> st.SearchStrategy[kinds.Rate]:
    lengths = st.integers(1, max_steps)
    decays = _keras_decays(lengths)
    return st.recursive(decays, lambda inner: _around(inner | RATES, lengths), max_leaves=4)


@st.composite
def _falling_rates(draw: st.DrawFn) -> tuple[float, float]:
    peak, end = draw(st.tuples(RATES, RATES))
    return max(peak, end), min(peak, end)


def _keras_decays(lengths: st.SearchStrategy[int]) -> st.SearchStrategy[LearningRateSchedule]:
    def between(ends: tuple[float, float]) -> st.SearchStrategy[LearningRateSchedule]:
        first, last = map(st.just, ends)
        powers = st.sampled_from([1.0, 2.0])
        polynomials = st.builds(PolynomialDecay, first, lengths, last, power=powers)
        return polynomials | st.builds(CosineDecay, first, lengths, alpha=last)

    return _falling_rates().flatmap(between)


def _around(
    parts: st.SearchStrategy[kinds.Rate], lengths: st.SearchStrategy[int]
) -> st.SearchStrategy[kinds.Rate]:
    return st.one_of(
        st.builds(kinds.LinearWarmup, parts, lengths, RATES),
        st.builds(kinds.ScaledSchedule, parts, st.floats(0.25, 8), st.sampled_from(scaling.RULES)),
        _joined(parts),
    )


@st.composite
def _joined(draw: st.DrawFn, parts: st.SearchStrategy[kinds.Rate]) -> kinds.JoinedSchedule:
    pieces = draw(st.lists(parts, min_size=1, max_size=3))
    count = len(pieces) - 1
    between = draw(st.sets(st.integers(1, 40), min_size=count, max_size=count))
    return kinds.JoinedSchedule(pieces, sorted(between))
