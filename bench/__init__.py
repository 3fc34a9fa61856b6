"""Benches: ckptio beside its peers and the machine's own limits, in the same run.

`python -m bench` runs all cases, `python -m bench --list` names them. A figure alone says
little on a shared machine: read the ratios.

Cases with several ranks (`save_ranks`, `load_ranks`, `reshard`, `replicated_load`) start real
processes in a gloo group, once, and tell them what to do round by round (`bench.crew`,
`bench.rank`); the slowest rank's time counts. What no machine at hand shows, thousands of
ranks, is counted and drawn out along a line in `scale`, with what would break first.
"""
