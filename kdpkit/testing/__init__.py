"""Property tests of how batches are split: generators, laws, logical devices and toy data.

`generators` has Hypothesis strategies for examples, batches, datasets and shards; `laws` has what
must hold for code of your own that works on them. Four logical CPUs are real replicas: what breaks
on four GPUs when batches are split and gradients are summed breaks on them too. With pytest,
`kdpkit_devices = 4` under `[tool.pytest.ini_options]` makes them, and
`@pytest.mark.kdpkit_devices(4)` skips a test where there are fewer.
"""

from typing import TYPE_CHECKING

from kdpkit._internal import lazy_names

if TYPE_CHECKING:
    from kdpkit.testing import generators as generators
    from kdpkit.testing import laws as laws
    from kdpkit.testing._toys import tiny_classifier, toy_classification, use_logical_cpus

_HOMES = {
    "generators": "generators",
    "laws": "laws",
    "tiny_classifier": "_toys",
    "toy_classification": "_toys",
    "use_logical_cpus": "_toys",
}

__all__ = ["generators", "laws", "tiny_classifier", "toy_classification", "use_logical_cpus"]

if not TYPE_CHECKING:  # a checker then reports names that there are not
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
