"""Deterministic simulation of a whole cluster: the product's own threaded code, in one process and in virtual time."""
