"""Engine that runs a worker's tasks, with ackers and topology master."""
