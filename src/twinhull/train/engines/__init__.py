"""How the ranks train one model together: whole on each of them, or sharded over them."""

from twinhull.train.engines.choose import Engine, choose

__all__ = ["Engine", "choose"]
