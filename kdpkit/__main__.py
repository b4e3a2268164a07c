"""`python -m kdpkit` is `kdpkit`."""

import sys

from kdpkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
