"""Read-only questions: status, explanations, inspection, plans."""
