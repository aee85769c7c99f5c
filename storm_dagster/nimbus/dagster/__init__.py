"""The client of Dagster: transport, queries, runs."""
