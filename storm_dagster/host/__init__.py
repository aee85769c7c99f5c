"""The machine: processes, files, locks, Java, clocks and objects loaded by name."""
