"""Tasks of a worker: runners of spouts and bolts on the loop."""
