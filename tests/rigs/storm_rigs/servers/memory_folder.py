"""Folder of files that no disk holds."""

from __future__ import annotations

import os

MEMORY_FOLDER: str | None = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Parent of the temporary folders of state machines, which call ``fsync`` thousands of times;
``None``, the default of :mod:`tempfile`, where there is no such file system.
"""
