"""The worker process: its loop, session, heartbeats, log levels and shutdown."""
