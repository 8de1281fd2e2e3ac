"""What all commands share: help, exit codes, and how trouble is told."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

COMMANDS = (
    "demo", "probe", "spectra", "fit", "predict", "reproduce", "dashboard",
    "runs list", "runs show", "runs compare", "runs export", "runs remove",
)  # fmt: skip


def test_every_command_has_help_with_examples_that_name_it(featlearn: Any) -> None:
    whole = featlearn("--help")
    assert whole.code == 0
    for command in COMMANDS:
        assert command.split()[0] in whole.out
        reported = featlearn(*command.split(), "--help")
        assert reported.code == 0
        assert f"featlearn {command}" in reported.out.split("Examples:")[1]
        assert "--json" in reported.out
        assert max(map(len, reported.out.splitlines())) <= 80
    assert "--install-completion" in whole.out


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "featlearn", "runs", "list", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "featlearn: root must be an existing folder, got 'nowhere'.\n"


def test_a_traceback_is_shown_to_those_who_ask(featlearn: Any) -> None:
    reported = featlearn("--debug", "runs", "show", "nowhere")
    assert reported.code == 1
    assert "Traceback" in reported.err
    assert reported.err.strip().splitlines()[-1].startswith("featlearn: ")
    assert featlearn("runs", "show", "nowhere").sentence == reported.err.strip().splitlines()[-1]


def test_wrong_options_end_with_2(featlearn: Any) -> None:
    for arguments in (("nonsense",), ("runs", "list", "--wrong"), ("predict", "model"), ("dashboard", "--port", "x")):
        done = featlearn(*arguments)
        assert (done.code, done.out) == (2, "")
        assert "Traceback" not in done.err
    assert featlearn("--version").out.startswith("featlearn ")


def test_the_dashboard_says_what_is_missing(featlearn: Any) -> None:
    assert "FOLDER must be an existing folder with runs, got 'nowhere'" in featlearn("dashboard", "nowhere").sentence


def test_the_dashboard_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from featlearn.cli import _dashboard as module

    def without(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'starlette' for {name}", name="starlette")

    monkeypatch.setattr("featlearn.cli._dashboard.importlib.import_module", without)
    with pytest.raises(typer.Exit):
        module.dashboard()
    reported = "The dashboard requires starlette, which is not installed. Run pip install 'featlearn[dashboard]'."
    assert capsys.readouterr().err == f"featlearn: {reported}\n"


def test_an_unexpected_error_is_a_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from featlearn.cli._errors import handle_errors

    with pytest.raises(typer.Exit) as ended, handle_errors():
        raise ZeroDivisionError("two\nlines")
    assert ended.value.exit_code == 1
    assert (
        capsys.readouterr().err
        == "featlearn: ZeroDivisionError: two lines (featlearn --debug ... shows the traceback)\n"
    )
    with handle_errors():
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("y is constant", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "featlearn: y is constant\n"


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    code = """
import sys
class Stop:
    def find_spec(self, name, *more):
        if name == "featlearn.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
import featlearn.cli
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "featlearn: stopped. Nothing was written.\n")


def test_a_stream_that_knows_no_plus_minus_shows_a_question_mark() -> None:
    from featlearn.cli._errors import replace_unsupported_characters

    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    replace_unsupported_characters(stream)
    stream.write("1 ± 2")
    stream.flush()
    assert stream.buffer.getvalue() == b"1 ? 2"  # type: ignore[attr-defined]
    replace_unsupported_characters(io.StringIO())
