"""The line that says what a command is doing."""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import pytest

from hetspmd.cli.progress import Elapsed, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    """The line that a terminal shows in the end, and beneath it nothing."""
    line, at, text = "", 0, stream.getvalue()
    while text:
        if text.startswith("\x1b[K"):
            line, text = line[:at], text[3:]
        elif text[0] == "\r":
            at, text = 0, text[1:]
        else:
            line, at, text = line[:at] + text[0] + line[at + 1 :], at + 1, text[1:]
    return line


def test_a_bar_is_for_terminals() -> None:
    for stream, wanted, silent in (
        (Terminal(), True, False), (Terminal(), False, True), (io.StringIO(), True, True)
    ):  # fmt: skip
        bar = Progress(60.0, wanted, stream)
        bar("matmul float32")
        bar("too soon to show")
        assert shown(stream) == ("" if silent else f"[{'.' * 30}]     0 s of 60 s  matmul float32")
        bar.close()
        assert (stream.getvalue() == "") == silent
        assert shown(stream) == ""


def test_elapsed_goes_on_while_one_thing_takes_long() -> None:
    stream = Terminal()
    threads = threading.active_count()
    with Elapsed(stream) as progress:
        progress("tracing the model")
        progress("searching programs")
        end = time.monotonic() + 30
        while "1 s  searching programs" not in stream.getvalue():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert threading.active_count() == threads + 1
    assert "tracing" not in stream.getvalue()
    assert shown(stream) == ""
    assert threading.active_count() == threads


def test_elapsed_ends_with_what_failed() -> None:
    stream = Terminal()

    def search() -> None:
        with Elapsed(stream) as progress:
            progress("searching programs")
            time.sleep(0.6)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert "searching programs" in stream.getvalue()
    assert shown(stream) == ""


def test_elapsed_is_silent_where_nobody_looks() -> None:
    stream = io.StringIO()
    with Elapsed(stream) as progress:
        progress("searching programs")
        time.sleep(0.6)
    assert stream.getvalue() == ""


def test_what_is_written_meanwhile_takes_the_lines_place() -> None:
    stream = Terminal()
    bar = Progress(60.0, True, stream)
    bar("matmul")
    stream.write("a warning that is longer than what the line said of the ops and of the budget")
    assert shown(stream) == "a warning that is longer than what the line said of the ops and of the budget"


def test_compile_says_what_it_is_doing(
    command: Any, targets: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Elapsed, "__call__", lambda _self, what: told.append(what))
    assert command("compile", targets, "--cluster", cluster).status == 0
    words = [what for what in dict.fromkeys(told) if what]
    assert words == ["tracing the model", "deriving rules", "searching programs", "balancing ratios"]
