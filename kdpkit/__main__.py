"""`python -m kdpkit` is `kdpkit`."""

import sys

from kdpkit._internal import ctrl_c  # noqa: F401 Ctrl-C is one line from here on


def main() -> int:
    """Run `kdpkit.cli.main`, which takes a while to import."""
    from kdpkit import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
