"""Log files over HTTP: JStorm's ``/logview``, pages of Storm's logviewer."""
