"""Training and serving as one vessel: two hulls, a queue between them."""

__version__ = "0.1.0"
