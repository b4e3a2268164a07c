"""Hypothesis strategies that several tests use, on TensorFlow and JAX alike."""

from hypothesis import strategies as st
from keras.optimizers.schedules import CosineDecay, PolynomialDecay

from kdpkit import scaling, schedules

replica_counts = st.integers(1, 4)
rates = st.floats(0.01, 1.0)
step_counts = st.integers(1, 20)


@st.composite
def falling_rates(draw):
    """Draw a peak and an end rate that is no higher."""
    peak, end = draw(st.tuples(rates, rates))
    return max(peak, end), min(peak, end)


@st.composite
def warmup_stable_decays(draw):
    peak, end = draw(falling_rates())
    warmup, stable, decay = draw(st.tuples(st.integers(0, 20), st.integers(0, 20), step_counts))
    return schedules.WarmupStableDecay(
        peak,
        total_steps=warmup + stable + decay,
        warmup_steps=warmup,
        decay_steps=decay,
        end_learning_rate=end,
        shape=draw(st.sampled_from(schedules.SHAPES)),
    )


@st.composite
def joined_schedules(draw, parts):
    pieces = draw(st.lists(parts, min_size=1, max_size=3))
    boundaries = draw(
        st.sets(st.integers(1, 40), min_size=len(pieces) - 1, max_size=len(pieces) - 1)
    )
    return schedules.JoinedSchedule(pieces, sorted(boundaries))


def _keras_decays():
    return falling_rates().flatmap(
        lambda ends: st.one_of(
            st.builds(
                PolynomialDecay,
                st.just(ends[0]),
                step_counts,
                st.just(ends[1]),
                power=st.sampled_from([1.0, 2.0]),
            ),
            st.builds(CosineDecay, st.just(ends[0]), step_counts, alpha=st.just(ends[1])),
        )
    )


def _around(parts):
    return st.one_of(
        st.builds(schedules.LinearWarmup, parts, step_counts, rates),
        st.builds(
            schedules.ScaledSchedule, parts, st.floats(0.25, 8), st.sampled_from(scaling.RULES)
        ),
        joined_schedules(parts),
    )


#: Schedules of every kind, nested a few deep, that change within their first 100 steps or so.
learning_rate_schedules = st.recursive(
    st.one_of(
        _keras_decays(),
        warmup_stable_decays(),
        st.builds(schedules.NoamDecay, st.integers(1, 512), step_counts, rates),
    ),
    lambda inner: _around(st.one_of(inner, rates)),
    max_leaves=4,
)
