"""What does a function that the file names take, and how is it called with the rows of a batch?

The description is JSON: the gateway validates bodies by it without importing the user's modules.
`python -m twinhull.serve.entry --run DIR MODULE:FUNCTION ...` makes it, once, before anything is started.
"""

import contextlib
import dataclasses
import importlib
import inspect
import json
import signal
import sys
import traceback
import types
import typing
from collections.abc import Callable
from typing import Any, TypedDict, Union, get_args, get_origin

import msgspec

from twinhull import processes
from twinhull.errors import TwinhullError, UserCodeError

Shape = str | list[Any]  # Any: "int", or ["list", Shape], ["dict", Shape], ["either", Shape, ...]
_PLAIN: dict[object, Shape] = {
    int: "int",
    float: "float",
    str: "str",
    bool: "bool",
    None: "null",
    type(None): "null",
    list: ["list", "any"],
    dict: ["dict", "any"],
}


class Parameter(TypedDict):
    """One field of a request's body."""

    name: str
    type: Shape
    required: bool


class Entry(TypedDict):
    """What the gateway and the supervisor know of a function.

    `rows` says whether it takes a list of rows; null: it does if the file gives its task a batch.
    `parameters` are its fields if it is called once per row, `row` those of one of its rows; null if any
    object will do. `model` is the class whose current version it wants as `model=`, as module:class.
    """

    run: str
    rows: bool | None
    parameters: list[Parameter] | None
    row: list[Parameter] | None
    model: str | None


def load(run: str) -> Callable[..., Any]:  # Any: the user's own signature
    """The function that a run (`module:function`) names.

    Raises UserCodeError if there is none or its module cannot be imported.
    """
    module_name, _, name = run.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise UserCodeError(
                f"{run}: there is no module {missing!r}.",
                hint="Modules are looked for beside the system file.",
            ) from error
        raise UserCodeError(f"{run}: importing {module_name} failed: {error}.", hint=_where(error)) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserCodeError(
            f"{run}: importing {module_name} raised {type(error).__name__}: {error}.", hint=_where(error)
        ) from error
    found = getattr(module, name, None)
    if found is None:
        names = ", ".join(sorted(n for n, v in vars(module).items() if inspect.isfunction(v))) or "none"
        raise UserCodeError(f"{run}: {module_name} has no {name!r}.", hint=f"Its functions: {names}.")
    if not callable(found):
        raise UserCodeError(f"{run}: {name} is a {type(found).__name__}, not a function.")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise UserCodeError(f"{run}: {name} is not a plain function.", hint="Make it return its answer.")
    return found


def parameters_of(run: str, function: Callable[..., Any]) -> list[inspect.Parameter]:  # Any: the user's own
    """The parameters of a user's function, annotations evaluated where they can be."""
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError:  # an annotation imported for the type checker only
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError, SyntaxError) as error:
        raise UserCodeError(f"{run}: its signature cannot be read: {error}.") from error


def takes_rows(parameters: list[inspect.Parameter], *, batch: bool) -> bool:
    """Whether a function is called with a list of rows.

    It is if its first parameter is a list named `rows`, or if the file gives its task a batch and the
    annotation does not speak against it.
    """
    known = _takes_rows(parameters)
    return batch if known is None else known


def describe(run: str) -> Entry:
    """What a function takes. Imports the user's module; raises UserCodeError if it cannot be a task."""
    function = load(run)
    parameters = parameters_of(run, function)
    rows = _takes_rows(parameters)
    model = next((p for p in parameters if p.name == "model"), None)
    return Entry(
        run=run,
        rows=rows,
        parameters=_body_fields(parameters),
        row=None if rows is False else _row_fields(parameters),
        model=None if model is None else _class_name(run, model),
    )


def model_class(run: str, parameters: list[inspect.Parameter]) -> type | None:
    """The class of the model that a function wants, or None. Raises UserCodeError if it is not named."""
    model = next((p for p in parameters if p.name == "model"), None)
    if model is None:
        return None
    if not isinstance(model.annotation, type) or model.annotation is model.empty:
        raise UserCodeError(
            f"{run}: the class of its parameter model is not known ({_text(model.annotation)}).",
            hint="Annotate it with the model's class, imported at run time: `*, model: TwoTower`.",
        )
    return model.annotation


def _class_name(run: str, model: inspect.Parameter) -> str:
    found = model_class(run, [model])
    assert found is not None
    return f"{found.__module__}:{found.__qualname__}"


def _takes_rows(parameters: list[inspect.Parameter]) -> bool | None:
    first = next((p for p in parameters if p.name != "model"), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return False
    if first.annotation is first.empty:
        return None
    if (get_origin(first.annotation) or first.annotation) is not list:
        return False
    return True if first.name == "rows" else None


def row_type(parameters: list[inspect.Parameter]) -> Any:  # Any: a type or a generic alias
    """The type of one row, for a function that takes rows."""
    first = next(p for p in parameters if p.name != "model")
    return next(iter(get_args(first.annotation)), Any)


def _body_fields(parameters: list[inspect.Parameter]) -> list[Parameter] | None:
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return [
        Parameter(name=p.name, type=_shape(p.annotation), required=p.default is p.empty)
        for p in parameters
        if p.name != "model" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


def _row_fields(parameters: list[inspect.Parameter]) -> list[Parameter] | None:
    kind = row_type(parameters)
    if not (dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))):
        return None
    try:
        fields = (
            msgspec.structs.fields(kind) if not dataclasses.is_dataclass(kind) else dataclasses.fields(kind)
        )
        hints = typing.get_type_hints(kind)
    except (NameError, TypeError):
        return None
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    return [
        Parameter(
            name=f.name,
            type=_shape(hints[f.name]),
            required=f.default in missing and f.default_factory in missing,
        )
        for f in fields
    ]


def _shape(annotation: Any) -> Shape:  # Any: whatever stands behind the colon
    if annotation is None or isinstance(annotation, type):
        return _PLAIN.get(annotation, "any")
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return ["list", _shape(arguments[0])]
    if origin is dict and arguments[0] is str:
        return ["dict", _shape(arguments[1])]
    if origin in (Union, types.UnionType):
        return _either([_shape(a) for a in arguments])
    return "any"


def _either(shapes: list[Shape]) -> Shape:
    """One of several shapes, or any where JSON could not tell them apart."""
    kinds = [s if isinstance(s, str) else s[0] for s in shapes]
    if "any" in kinds or len(set(kinds)) < len(kinds) or "either" in kinds:
        return "any"
    return ["either", *shapes]


def _text(annotation: object) -> str:
    return "not annotated" if annotation is inspect.Parameter.empty else str(annotation)


def _where(error: BaseException) -> str:
    """The user's own last line in a traceback, as file:line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"See {error.filename}:{error.lineno}."
    foreign = ("site-packages", "importlib", __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    own = [f for f in frames if not any(part in f.filename for part in foreign)]
    return f"See {own[-1].filename}:{own[-1].lineno}." if own else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the descriptions of the named functions as one JSON object; on error one JSON line and exit 2."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = sys.argv[1:] if arguments is None else arguments
    runs = given[2:] if given[:1] == ["--run"] else given
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's modules print is not our answer
            found = {run: describe(run) for run in runs}
        print(json.dumps(found))
    except TwinhullError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
