"""The machine: processes, files, locks, Java, clocks, named objects."""
