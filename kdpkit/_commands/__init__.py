"""The subcommands of `kdpkit`, a file each.

A file has `HELP`, one line; `add_arguments(parser)`; and `run(args) -> int`, which gives the exit
code. What follows `--` on the command line is `args.rest`, where `TAKES_REST` is true; elsewhere it
is refused.
"""
