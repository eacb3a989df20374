"""The serving hull: many workers, one deadline, always an answer."""
