"""Components that block: each has a thread."""
