"""`python -m kdpkit` is `kdpkit`."""

import sys


def main() -> int:
    """Run `kdpkit.cli.main`, which takes a while to import."""
    from kdpkit import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
