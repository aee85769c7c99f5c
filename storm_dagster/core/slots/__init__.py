"""State machine of a supervisor slot."""
