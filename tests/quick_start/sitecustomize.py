"""Lets the processes of the tests, and those that they start, collect garbage rarely.

Half of the time that tests take is that of processes which import the frameworks, and a fifth of an
import is Python's collector, which looks for garbage where there is none. Python runs this file
when it starts with this directory on its path.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
