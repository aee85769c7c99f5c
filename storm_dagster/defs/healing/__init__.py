"""Healing: the heartbeat sensor, its memory, and the job that reassigns tasks."""
