"""The HTTP service of nimbus."""
