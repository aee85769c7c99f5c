"""From a TARGET to the topology's description and the archive that travels with it."""
