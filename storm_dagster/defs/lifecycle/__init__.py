"""Jobs, sensor and schedules that change topologies which run."""
