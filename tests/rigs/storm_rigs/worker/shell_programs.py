"""Programs of shell components that speak the multilang protocol without a library."""

from __future__ import annotations

BEGINNING = """
import json, os, sys, time
def read():
    lines = []
    while True:
        line = sys.stdin.readline()
        if not line: sys.exit()
        if line == "end\\n": return json.loads("".join(lines))
        lines.append(line)
def send(message):
    sys.stdout.write(json.dumps(message) + "\\nend\\n"); sys.stdout.flush()
first = read()
"""
"""Reads and sends messages, and has read the first one."""
