"""``hetspmd rules``: list the rules, test them by brute force, show one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hetspmd.errors import RuleError


def add(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "rules",
        parents=[debug],
        help="list, test and show the rules of ops",
        description="Rules say how an op may be divided. Without a subcommand: list.",
    )
    parser.set_defaults(run=run_list, load=None)
    kinds = parser.add_subparsers(metavar="list | check | show")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--load",
        metavar="FILE",
        help="import a file that registers rules first; it may define SAMPLES = {op: function that returns "
        "[(args, kwargs), ...]}",
    )

    listed = kinds.add_parser("list", parents=[debug, common], help="all ops with a rule of their own")
    listed.set_defaults(run=run_list)

    check = kinds.add_parser(
        "check",
        parents=[debug, common],
        help="test every row of the rules by brute force",
        description="Split random inputs unevenly by each row's precondition, run the op on each part, put "
        "the results together by the postcondition and compare with the whole. Exit status 1 if a row is "
        "wrong, or, with --missing, if a row that holds is not there.",
    )
    check.add_argument("ops", nargs="*", metavar="OP", help="mm, add.Tensor, mylib::op, ... (default: all)")
    check.add_argument("--missing", action="store_true", help="look for rows that hold and are not there")
    check.set_defaults(run=run_check)

    show = kinds.add_parser("show", parents=[debug, common], help="the triples of an op on its samples")
    show.add_argument("op", metavar="OP")
    show.set_defaults(run=run_show)


def _load(options: argparse.Namespace) -> dict[str, Any]:
    """Register the built-in rules and those of ``--load``; the samples of the latter."""
    import hetspmd.rules.ops  # noqa: F401  # registers the built-in rules
    from hetspmd.cli.target import load_module
    from hetspmd.rules.registry import op_name

    if options.load is None:
        return {}
    module = load_module(options.load)
    return {op_name(op): samples for op, samples in getattr(module, "SAMPLES", {}).items()}


def _full_name(op: str) -> str:
    """``mm`` as ``aten.mm.default``, ``add.Tensor`` as ``aten.add.Tensor``.

    Raises RuleError, with the nearest name, for an op without a rule.
    """
    import difflib

    from hetspmd.rules.registry import op_name, registered, rule_function

    candidates = [op] if "::" in op or op.count(".") == 2 else [f"aten.{op}", f"aten.{op}.default", op]
    for candidate in candidates:
        try:
            name = op_name(candidate)
        except RuleError:
            continue
        if rule_function(name) is not None:
            return name
    names = [n.removeprefix("aten.").removesuffix(".default") for n in registered()]
    near = difflib.get_close_matches(op, names, n=3)
    hint = (
        f"the nearest with one are {', '.join(near)}"
        if near
        else "hetspmd rules list shows those that have one"
    )
    raise RuleError(f"{op} has no rule; {hint}")


def run_list(options: argparse.Namespace) -> int:
    """Print the names of all ops with a rule of their own."""
    from hetspmd.rules.registry import families, registered

    _load(options)
    names = registered()
    for name in names:
        print(name)
    print(
        f"{len(names)} ops with a rule of their own; families for others: {', '.join(families())}",
        file=sys.stderr,
    )
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Test rules; 1 if any row is wrong (or missing, where that was asked)."""
    from hetspmd.rules import samples as bundled
    from hetspmd.rules.oracle import check

    own = _load(options)
    ops = {*bundled.load().samples, *bundled.load().untested, *own}
    names = [_full_name(op) for op in options.ops] or sorted(ops)
    failed = 0
    for name in names:
        if name not in ops:
            raise RuleError(
                f"{name} has no samples; define SAMPLES = {{{name!r}: ...}} in a file and give it by --load"
            )
        report = check(name, own.get(name), missing=options.missing)
        failed += not report.ok
        print(report)
    print(f"{len(names)} ops: {f'{failed} failed' if failed else 'all ok'}")
    return 1 if failed else 0


def run_show(options: argparse.Namespace) -> int:
    """Print the triples of an op on each of its sample calls."""
    from hetspmd.rules import samples as bundled
    from hetspmd.rules.brute import case_of
    from hetspmd.rules.oracle import sample_text
    from hetspmd.rules.registry import rule_for

    own = _load(options)
    name = _full_name(options.op)
    make = own.get(name) or bundled.load().samples.get(name)
    if make is None:
        raise RuleError(f"{name} has a rule and no samples to show it on; give some by --load")
    for args, kwargs in make() if callable(make) else make:
        case = case_of(name, args, kwargs, 0)
        rule = rule_for(case.call)
        print(sample_text(case))
        for row in rule.rows(case.call) if rule is not None else ():
            print(f"  {row}")
        for omitted, reason in sorted(rule.omitted.items()) if rule is not None else ():
            print(f"  left out: {omitted}: {reason}")
    return 0
