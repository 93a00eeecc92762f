"""HiGHS, which must not write to standard output: a program's output there belongs to its caller."""

from __future__ import annotations

from typing import Any

import highspy


def quiet_highs(**options: Any) -> highspy.Highs:
    """A solver that logs nowhere, whichever version it is, with further options of HiGHS."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy is untyped
    # The first options of all: later ones may be reported as they are set. The banner comes with the first run.
    for option, setting in (("output_flag", False), ("log_to_console", False), *options.items()):
        solver.setOptionValue(option, setting)
    return solver
