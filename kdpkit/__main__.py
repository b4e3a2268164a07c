"""`python -m kdpkit` is `kdpkit`."""

import sys

from kdpkit import cli

if __name__ == "__main__":
    sys.exit(cli.main())
