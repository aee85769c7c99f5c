"""Pages for browsers: topologies, hosts, placements and problems. They are read-only."""
