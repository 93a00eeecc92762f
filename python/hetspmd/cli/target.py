"""TARGET on the command line: ``path/to/file.py[:function]`` or ``package.module[:function]``.

The function (default ``build``) takes nothing and returns ``(model, example)``: a module, and a batch as a
dict of keyword arguments or a tuple of positional ones.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hetspmd.errors import HetspmdError, TargetError

DEFAULT_FUNCTION = "build"


def load_target(target: str) -> tuple[nn.Module, Any]:
    """The model and the example of a TARGET. Raises TargetError."""
    place, name = _split(target)
    module = load_module(place)
    function = _function(module, place, name)
    try:
        returned = function()
    except HetspmdError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"{place}:{name} raised {_described(error, module)}; call it in Python first"
        ) from error
    return _checked(returned, f"{place}:{name}")


def target_place(target: str) -> str:
    """The file or the dotted name of a TARGET. Raises TargetError."""
    return _split(target)[0]


def load_module(place: str) -> ModuleType:
    """The module of a file or of a dotted name. Raises TargetError."""
    if place.endswith(".py") or "/" in place:
        return _from_file(Path(place))
    if not all(part.isidentifier() for part in place.split(".")):
        raise TargetError(
            f"{place!r} is neither a file nor a module; write file.py:function or package.module:function"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            file = Path(place.replace(".", "/") + ".py")
            hint = (
                f"; write {file} for that file"
                if file.is_file()
                else "; run from its folder, or name a file such as model.py"
            )
            raise TargetError(f"there is no module {error.name}{hint}") from error
        raise TargetError(f"importing {place} raised {_described(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing {place} raised {_described(error, None)}") from error


def _split(target: str) -> tuple[str, str]:
    place, colon, name = target.rpartition(":")
    if not colon:
        return target, DEFAULT_FUNCTION
    if not place or not name.isidentifier():
        raise TargetError(
            f"{target!r} is no target; write path/to/file.py:function or package.module:function"
        )
    return place, name


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TargetError(f"{path} {what}; write path/to/file.py:function")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"_hetspmd_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file; write path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except HetspmdError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"{path} raised {_described(error, module)} when it was imported") from error
    return module


def _function(module: ModuleType, place: str, name: str) -> Any:
    function = getattr(module, name, None)
    if function is None:
        own = [
            n
            for n, f in vars(module).items()
            if inspect.isfunction(f) and f.__module__ == module.__name__ and n[0] != "_"
        ]
        close = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(own) or 'no function'}"
        raise TargetError(f"{place} has no function {name}; {hint}")
    if not callable(function):
        raise TargetError(
            f"{place}:{name} is a {type(function).__name__}; name a function that returns (model, example)"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TargetError(
            f"{place}:{name} takes nothing when it is a target, but: {error}; give its parameters defaults"
        ) from error
    return function


def _checked(returned: Any, name: str) -> tuple[nn.Module, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TargetError(f"{name} returned {_kind(returned)}; return (model, example)")
    model, example = returned
    if not isinstance(model, nn.Module):
        raise TargetError(f"{name} returned {_kind(model)} as the model; return (torch.nn.Module, example)")
    if not isinstance(example, (dict, tuple)):
        raise TargetError(
            f"{name} returned {_kind(example)} as the example; return a dict of keyword "
            "arguments or a tuple of positional ones"
        )
    return model, example


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _described(error: BaseException, module: ModuleType | None) -> str:
    """``TypeError: message (file:line)``, the line in the target's own file where it has one."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    own = [f for f in frames if module is not None and f.filename == getattr(module, "__file__", None)]
    if isinstance(error, SyntaxError):
        return text
    frame = (own or frames)[-1]
    return f"{text} ({frame.filename}:{frame.lineno})"
