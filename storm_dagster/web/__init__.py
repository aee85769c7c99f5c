"""Dagster's web application behind guard and authentication.

It is the daemon of ``storm-dagster daemon web``.
"""
