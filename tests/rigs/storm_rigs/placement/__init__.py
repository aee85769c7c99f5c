"""Generated clusters for planners, and what every placement keeps."""
