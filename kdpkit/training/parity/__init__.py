"""`check_parity`: whether replicas train what one device trains, and if not, why.

`_check` trains models and compares them, `_runs` is what they are compared by, `_suspects` what may
differ, `_data` checks the batches, `_report` says what was found.
"""
