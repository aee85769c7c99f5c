"""Pictures as SVG text, for pages of nimbus, metadata in Dagster and files; pure."""
