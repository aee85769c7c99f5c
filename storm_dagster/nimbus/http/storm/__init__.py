"""Storm's REST under ``/api/v1``: the paths and keys of Storm's UI."""
