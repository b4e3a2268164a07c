"""Hypothesis strategies that several tests use, on TensorFlow and JAX alike."""

from hypothesis import strategies as st

from kdpkit.testing import generators

replica_counts = generators.replica_counts(max_value=4)
rates = st.floats(0.01, 1.0)
