"""Snapshot of a running topology: the one value that documents, pages, metrics and checks format."""
