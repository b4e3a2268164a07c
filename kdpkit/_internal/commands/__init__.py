"""The subcommands of `kdpkit`, a file each.

A file has `HELP`, one line; `EXAMPLE`, the end of the command's `--help`; `add_arguments(parser)`;
and `run(args) -> int`, which returns the exit code. What follows `--` on the command line is
`args.rest`, where `TAKES_REST` is true; elsewhere it is an error.
"""
