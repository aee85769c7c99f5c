"""Description of a TARGET's topology, and the archive of its code."""
