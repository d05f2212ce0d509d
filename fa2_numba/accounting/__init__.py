"""Experiments, figures and the report, all from one table of `fa2_numba.traffic.Traffic` rows."""
