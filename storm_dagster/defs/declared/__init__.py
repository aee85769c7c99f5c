"""Topologies declared in `defs.yaml`: their component, assets, checks, deploys and sensor."""
