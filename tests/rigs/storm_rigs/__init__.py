"""Rigs of the tests: daemons, ensembles, faults and generated clusters. Not part of the
distribution.
"""
