"""The command line: ``hetspmd compile | profile | verify | rules | solve | doctor``.

Exit status: 0 done, 1 a check failed, 2 bad input (one line on standard error: what, where, how to mend it),
70 a fault of hetspmd itself (with its traceback), 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn, TextIO

import hetspmd
from hetspmd.cli import compile as compile_command
from hetspmd.cli import doctor, profile, rules, solve, verify
from hetspmd.cli.outputs import STDOUT
from hetspmd.cli.stdout import kept_for_data
from hetspmd.errors import CheckError, HetspmdError, MissingRuleWarning

DONE, FAILED, BAD_INPUT, FAULT, INTERRUPTED = 0, 1, 2, 70, 130

_COMMANDS = (compile_command, profile, verify, rules, solve, doctor)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and name a misspelt option before one that is missing."""

    arguments: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # argparse's overloads
        """As argparse's; the arguments are kept for :meth:`error`."""
        self.arguments = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(self.arguments, namespace)

    def error(self, message: str) -> NoReturn:
        if "required" in message or message.startswith("unrecognized arguments"):
            options = self._options()
            for argument in self.arguments:
                name = argument.partition("=")[0]
                if name.startswith("--") and not any(option.startswith(name) for option in options):
                    near = get_close_matches(name, options, 1)
                    message = f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else "")
                    break
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _options(self) -> list[str]:
        """The options of this parser and of the command that was given to it."""
        options = [option for action in self._actions for option in action.option_strings]
        for action in self._actions:
            commands = action.choices if isinstance(action.choices, dict) else {}
            command = next((commands[a] for a in self.arguments if a in commands), None)
            options += [] if command is None else command._options()
        return options


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run``: parsed arguments to exit status."""
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    top = _Parser(
        prog="hetspmd", description="Uneven SPMD programs for PyTorch training on clusters of unlike devices."
    )
    top.add_argument("--version", action="version", version=f"hetspmd {hetspmd.__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.add(commands, debug)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else BAD_INPUT
    with warnings.catch_warnings(), _quiet_trace(options.debug):
        warnings.showwarning = _Warnings()
        warnings.simplefilter("always", MissingRuleWarning)
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        with kept_for_data(STDOUT in (getattr(options, "json", None), getattr(options, "out", None))):
            status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print("hetspmd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except HetspmdError as error:
        if options.debug:
            traceback.print_exc()
        name = f"hetspmd {options.command}"
        print(f"{name}: {type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        return FAILED if isinstance(error, CheckError) else BAD_INPUT
    except Exception:
        traceback.print_exc()
        print("hetspmd: this is a fault of hetspmd; please report it with the text above", file=sys.stderr)
        return FAULT


@contextmanager
def _quiet_trace(debug: bool) -> Iterator[None]:
    """Keep torch from logging the traceback of an op that fails on the example: its error says as much."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    if not debug:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def one_line(text: str) -> str:
    """``text`` with its line breaks and runs of spaces as single spaces."""
    return " ".join(text.split())


class _Warnings:
    """Shows each of hetspmd's warnings once, without a source line, and others as Python does."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self._other = warnings.showwarning

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, MissingRuleWarning):
            self._other(message, category, filename, lineno, file, line)
        elif str(message) not in self._shown:
            self._shown.add(str(message))
            print(f"hetspmd: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
