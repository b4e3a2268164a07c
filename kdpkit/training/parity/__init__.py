"""`check_parity`: whether replicas train what one device trains, and if not, why.

`_check` trains models and compares them, `_runs` has the comparison, `_suspects` the possible
causes, `_data` the checks of batches, `_report` the result.
"""
