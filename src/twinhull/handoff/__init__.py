"""The two beams between the hulls: models down to serving, events up to training."""
