"""Snapshot of a running topology, the value that every format is made of."""
