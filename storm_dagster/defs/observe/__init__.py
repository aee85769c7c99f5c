"""What the cluster does, as observations, checks, alerts, history and rolled-up metrics."""
