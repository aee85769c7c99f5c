"""Jobs, sensor and schedules that change running topologies."""
