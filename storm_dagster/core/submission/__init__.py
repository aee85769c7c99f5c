"""Submission of a topology: normalize, validate, add the system's components, number tasks."""
