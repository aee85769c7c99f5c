"""Blobs that are replicated between nimbuses."""
