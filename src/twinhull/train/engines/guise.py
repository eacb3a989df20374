"""How does a thing of the user's get other methods and stay what it is?"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

Method = Callable[..., Any]  # Any: the user's own


def give(thing: Any, methods: dict[str, Method]) -> None:  # Any: an object of any class
    """Let the thing have these methods in place of its class's; it stays an instance of its class.

    Copied or pickled it is again of its plain class.
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


def replace(thing: Any, instead: Mapping[str, Method]) -> None:  # Any: an object of any class
    """Call `instead[name](thing, real, ...)` in place of the thing's method; `real` is bound to the thing.

    One that somebody has put on the instance (a schedule on its optimizer, a compiler on a model) would be
    called before that of its class, and is the real one then.
    """
    methods: dict[str, Method] = {}
    for name, call in instead.items():
        if name in vars(thing):
            real: Method = vars(thing)[name]
            vars(thing)[name] = functools.wraps(real)(functools.partial(call, thing, real))
        else:
            methods[name] = _around(getattr(type(thing), name), call)
    give(thing, methods)


def _around(method: Method, instead: Method) -> Method:
    @functools.wraps(method)  # with PyTorch's marks and the signature
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # Any: as the method has it
        return instead(self, functools.partial(method, self), *args, **kwargs)

    return call


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
