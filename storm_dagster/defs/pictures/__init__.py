"""Pictures and tables in the metadata of assets."""
