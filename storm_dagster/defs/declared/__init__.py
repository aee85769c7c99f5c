"""Topologies declared in `defs.yaml`: component, assets, checks, deploys, sensor."""
