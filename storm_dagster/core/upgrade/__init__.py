"""State machine of a gray upgrade (``docs/decisions.md#gray-upgrade``)."""
