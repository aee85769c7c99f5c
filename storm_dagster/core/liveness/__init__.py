"""Detection of dead tasks and the causes for healing."""
