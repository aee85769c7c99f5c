"""The machine: processes, files, locks, Java, clocks and what is loaded by name."""
