"""What the commands of the benches on emulated clusters share."""

from __future__ import annotations

from pathlib import Path

import pytest

import emulated.command
import fits.command
import trust.command
import versus.command

COMMANDS = pytest.mark.parametrize("command", [trust.command, versus.command, fits.command])


@COMMANDS
def test_nothing_measured_is_no_failure(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--report", "--folder", str(tmp_path)]) == 0
    assert "nothing has been measured yet" in capsys.readouterr().out


@COMMANDS
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "GPT-9"], "nothing is called 'GPT-9'"), (["--rounds", "0"], "at least 1"),
        (["--steps", "0"], "at least 1"),
    ],
)  # fmt: skip
def test_options_that_mean_nothing(command, arguments, said, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert said in capsys.readouterr().err


@COMMANDS
def test_without_root_the_bench_is_skipped(
    command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated.command, "unavailable", lambda: "emulating a cluster needs root")
    assert command.main([]) == 0
    assert capsys.readouterr().out == "skipped: emulating a cluster needs root\n"
