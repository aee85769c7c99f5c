"""Pictures as SVG text: pure functions, for pages of nimbus, metadata in Dagster and files."""
