"""Worker process: loop, session, heartbeats, log levels and shutdown."""
