"""How does a thing of the user's get other methods and stay what it is?"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Method = Callable[..., Any]  # Any: the user's own


def give(thing: Any, methods: dict[str, Method]) -> None:  # Any: an object of any class
    """Let the thing have these methods in place of its class's; it stays an instance of its class.

    Copied or pickled it is again of its plain class. An instance's own attribute goes before its class's: who
    may have put one there looks for it.
    """
    kind: Any = type(thing)  # Any: a class made of it

    def reduce(self: object, protocol: int) -> tuple[object, ...]:
        made: Any = kind.__reduce_ex__(self, protocol)  # Any: as pickle has it
        make, arguments, *rest = made
        if make.__name__ != "__newobj__":  # copyreg's
            return made
        return _remade, (kind, *arguments[1:]), *rest

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    thing.__class__ = type(kind.__name__, (kind,), {**named, "__reduce_ex__": reduce, **methods})


def _remade(kind: type[Any], *arguments: object) -> object:  # Any: the user's class
    """What `copyreg.__newobj__` does, which pickle allows for an object's own class only."""
    return kind.__new__(kind, *arguments)


def ways_in(model: nn.Module) -> Iterator[str]:
    """The methods by which a model may be asked to compute: `forward` and all public ones of the user's."""
    yield "forward"
    for kind in type(model).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            continue
        for name, value in vars(kind).items():
            if inspect.isfunction(value) and not name.startswith("_") and not hasattr(nn.Module, name):
                yield name


def route(model: nn.Module, through: Callable[[Method, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Send each call of the model from outside through `through(method, (model, ...), {...})`.

    What the model calls of its own meanwhile goes straight to it.
    """
    is_inside = False

    def routed(name: str) -> Method:
        method: Method = getattr(type(model), name)

        @functools.wraps(method)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # Any: the user's own
            nonlocal is_inside
            if is_inside:
                return method(self, *args, **kwargs)
            is_inside = True
            try:
                return through(method, (self, *args), kwargs)
            finally:
                is_inside = False

        return call

    give(model, {name: routed(name) for name in dict.fromkeys(ways_in(model))})
