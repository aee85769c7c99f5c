"""Chaos: faults on a running cluster, and checks of what must hold afterwards.

:mod:`.faults` is the registry of what can be done to a cluster; :mod:`.workload` a word count whose
result is known; :mod:`.programme` draws faults at random, during submissions and rebalances too,
and counts what broke.
"""
