"""Read-only pages for browsers: topologies, hosts, placements, problems."""
