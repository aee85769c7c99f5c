"""Election of the leader and its duties."""
