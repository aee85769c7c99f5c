"""Snapshot of a running topology: the one value that all readers of it format."""
