"""Submission: staging, code, publication."""
