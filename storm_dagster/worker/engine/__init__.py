"""The engine that runs the tasks of one worker, with ackers and topology master."""
