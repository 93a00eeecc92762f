"""Files, folders, databases and other processes that forward looks at: named, with the line."""

from __future__ import annotations

import builtins
import glob
import gzip
import importlib
import inspect
import io
import json
import linecache
import logging
import os
import pickle
import sqlite3
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from io import FileIO
from os import listdir
from os.path import exists
from pathlib import Path
from sqlite3 import connect
from typing import Any

import numpy as np
import pytest
import torch
from test_clocks import Scaled
from torch import save

from hetspmd.errors import ClockWarning, FileWarning, TraceError
from hetspmd.trace.trace import trace

X = torch.randn(4, 3)
HERE = Path(__file__)
FOLDER = Path(tempfile.mkdtemp())
TEXT = FOLDER / "number.txt"
opener = open
IN_A_TUPLE = (open,)


@pytest.fixture(scope="module", autouse=True)
def files() -> None:
    TEXT.write_text("2.0", encoding="utf-8")
    np.save(FOLDER / "array.npy", np.array([2.0]))
    np.array([2.0]).tofile(FOLDER / "raw")
    (FOLDER / "number.json").write_text('{"k": 2.0}', encoding="utf-8")
    (FOLDER / "number.pickle").write_bytes(pickle.dumps(2.0))
    with gzip.open(FOLDER / "number.gz", "wt") as packed:
        packed.write("2.0")
    with zipfile.ZipFile(FOLDER / "number.zip", "w") as archive:
        archive.writestr("number", "2.0")


def _from_json() -> float:
    with open(FOLDER / "number.json", encoding="utf-8") as file:
        return float(json.load(file)["k"])


def _of_database() -> float:
    with sqlite3.connect(":memory:") as database:
        return float(database.execute("select 2.0").fetchone()[0])


def _by_descriptor() -> float:
    descriptor = os.open(TEXT, os.O_RDONLY)
    try:
        return float(os.read(descriptor, 3))
    finally:
        os.close(descriptor)


def _appended() -> float:
    with open(FOLDER / "log", "a", encoding="utf-8") as log:
        return 1.0 + 0.0 * log.write("x")


def _saved() -> float:
    torch.save({}, FOLDER / "saved.pt")
    return 1.0


def _opened(how: Callable[..., Any]) -> float:
    with how(TEXT) as file:
        return float(file.read())


WAYS: dict[str, Callable[[], float]] = {
    "open": lambda: _opened(open),
    "io.open": lambda: _opened(io.open),
    "another name": lambda: _opened(opener),
    "path": lambda: float(TEXT.read_text(encoding="utf-8")),
    "bytes": lambda: float(TEXT.read_bytes()),
    "json": _from_json,
    "pickle": lambda: float(pickle.loads((FOLDER / "number.pickle").read_bytes())),
    "gzip": lambda: float(gzip.open(FOLDER / "number.gz").read()),  # noqa: SIM115  # closed when it is collected
    "zip": lambda: float(zipfile.ZipFile(FOLDER / "number.zip").read("number")),
    "descriptor": _by_descriptor,
    "numpy": lambda: float(np.load(FOLDER / "array.npy")[0]),
    "raw": lambda: float(np.fromfile(FOLDER / "raw")[0]),
    "map": lambda: float(np.memmap(FOLDER / "raw", dtype=float, mode="r")[0]),
    "exists": lambda: 1.0 + os.path.exists(TEXT),
    "path exists": lambda: 1.0 + TEXT.exists(),
    "exists by its own name": lambda: 1.0 + exists(TEXT),
    "size": lambda: float(os.path.getsize(TEXT)),
    "time of change": lambda: os.path.getmtime(TEXT) % 7.0,
    "folder": lambda: float(len(os.listdir(FOLDER))),
    "folder by its own name": lambda: float(len(listdir(FOLDER))),
    "path's folder": lambda: float(len(list(FOLDER.iterdir()))),
    "pattern": lambda: float(len(glob.glob(f"{FOLDER}/*"))),
    "walk": lambda: float(len(list(os.walk(FOLDER)))),
    "working folder": lambda: float(len(os.getcwd())),
    "relative": lambda: float(len(os.path.abspath("x"))),
    "database": _of_database,
    "process": lambda: float(subprocess.run(["echo", "2"], check=True, capture_output=True).stdout),
    "shell": lambda: 1.0 + os.system("true"),
    "append": _appended,
    "save": _saved,
    "save by its own name": lambda: 1.0 + 0.0 * len(str(save({}, FOLDER / "saved.pt"))),
    "database by its own name": lambda: float(connect(":memory:").execute("select 2.0").fetchone()[0]),
    "no buffer": lambda: _opened(io.FileIO),
    "no buffer by its own name": lambda: _opened(FileIO),
    "random bytes of the system": lambda: 1.0 + (Path("/dev/urandom").exists() and 0.0),
}


def test_a_database_that_forward_is_the_first_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("sqlite3", "_sqlite3")]:
        monkeypatch.delitem(sys.modules, name)

    def number() -> float:
        module = importlib.import_module("sqlite3")
        return float(module.connect(":memory:").execute("select 2.0").fetchone()[0])

    with pytest.warns(FileWarning, match=r"\(sqlite3\.connect\) at .*test_files\.py:\d+: "):
        trace(Scaled(number), (X,), {})


def test_the_class_of_files_stays_a_class_while_a_model_is_traced() -> None:
    def number() -> float:
        with HERE.open("rb", buffering=0) as file:
            assert isinstance(file, io.FileIO)
            assert issubclass(io.FileIO, io.RawIOBase)
        return 1.0

    with pytest.warns(FileWarning):
        trace(Scaled(number), (X,), {})
    assert io.FileIO is FileIO
    assert type(io.FileIO) is type(io.BytesIO)


@pytest.mark.parametrize("name", WAYS)
def test_what_forward_looks_at_is_named_with_its_line(name: str) -> None:
    with pytest.warns(FileWarning, match=r"looks at a file.* at .*test_files\.py:\d+: .*no step of a plan"):
        trace(Scaled(WAYS[name]), (X,), {})


def test_elements_of_a_tuple_count_as_called() -> None:
    with pytest.warns(FileWarning, match=r"\(open, in IN_A_TUPLE\[0\] of module test_files\)"):
        trace(Scaled(lambda: _opened(IN_A_TUPLE[0])), (X,), {})
    clocks = (__import__("time").time,)
    with pytest.warns(ClockWarning, match=r"\(time\.time, in clocks\[0\], a variable around .*lambda"):
        trace(Scaled(lambda: 1.0 + 0.0 * clocks[0]()), (X,), {})


DATABASE = sqlite3.connect(":memory:")
HANDLE = HERE.open(encoding="utf-8")


@pytest.mark.parametrize("how", ["database", "handle"])
def test_what_was_opened_before_is_refused(how: str) -> None:
    def of_database() -> float:
        return float(DATABASE.execute("select 2.0").fetchone()[0])

    def of_handle() -> float:
        return float(len(HANDLE.readline()))

    number = of_database if how == "database" else of_handle
    with pytest.raises(TraceError, match=r"forward reads (DATABASE|HANDLE) of module test_files"):
        trace(Scaled(number), (X,), {})


def _logs() -> float:
    logging.getLogger("test_files").warning("one step")
    return 1.0


def _looks_at_its_source() -> float:
    linecache.clearcache()
    return 1.0 + 0.0 * len(inspect.getsource(_logs))


LAZY = "import json\nWIDE = json.load(open(%r))['k']\n"


def test_imports_logs_and_sources_are_no_files_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazily_imported.py").write_text(LAZY % str(FOLDER / "number.json"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def imports() -> float:
        return float(importlib.import_module("lazily_imported").WIDE)

    for number in (_logs, _looks_at_its_source, imports):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FileWarning)
            trace(Scaled(number), (X,), {})


def test_functions_are_python_s_own_again_after_a_trace_that_fails() -> None:
    before = open, os.stat, os.listdir, torch.save, subprocess.Popen.__init__

    def fails() -> float:
        _opened(open)
        raise ZeroDivisionError

    with pytest.raises(Exception, match="ZeroDivisionError"):
        trace(Scaled(fails), (X,), {})
    assert (open, os.stat, os.listdir, torch.save, subprocess.Popen.__init__) == before


def test_the_variables_of_python_s_modules_are_left_alone() -> None:
    namespace: dict[str, Any] = {"PATH": TEXT}
    exec("def number():\n    with open(PATH) as file:\n        return float(file.read())", namespace)
    assert namespace["__builtins__"]["open"] is open
    before = dict(vars(builtins))
    with pytest.warns(FileWarning, match="open"):
        trace(Scaled(lambda: float(namespace["number"]())), (X,), {})
    assert dict(vars(builtins)) == before
