"""Pages for browsers: what runs, what is slow, and why. They change nothing."""
