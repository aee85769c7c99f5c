"""Dagster instances, projects and pages of users."""
