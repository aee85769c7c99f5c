"""Gray upgrades: start, progress and end."""
