"""Programs for developers, run from a checkout: `python -m tools.benchmarks`. Not in the wheel."""
