"""Dagster's web application behind our guard and authentication: ``storm-dagster daemon web``."""
