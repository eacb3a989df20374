"""PLACE: a system becomes running things, here or on a cluster."""
