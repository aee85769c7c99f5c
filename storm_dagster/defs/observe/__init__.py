"""Observations, checks, alerts, history and rolled-up metrics of the cluster."""
