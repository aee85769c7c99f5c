"""Durable state of tasks: one log format, its storage, and views of it."""
