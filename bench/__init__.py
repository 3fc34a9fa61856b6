"""Benches: ckptio beside its peers and the machine's own limits, in the same run.

`python -m bench` runs all cases, `python -m bench --list` names them. A figure alone says
little on a shared machine: read the ratios.
"""
