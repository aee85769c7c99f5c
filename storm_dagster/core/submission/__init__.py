"""Submission of a topology.

It is normalized and validated, gets the system's components, and its tasks are numbered.
"""
