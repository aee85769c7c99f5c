"""Log files over HTTP: JStorm's ``/logview`` and the pages of Storm's logviewer."""
