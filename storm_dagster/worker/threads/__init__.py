"""Components that block, each in a thread of its own."""
