"""How a command ends: trouble in one plain sentence, and an exit code that a script can go by."""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import typer

from featlearn.errors import FeatlearnError

FAILED = 1
INTERRUPTED = 130
"""What shells use for a process that Ctrl-C has ended: 128 and the number of the signal."""

_NOTHING = "Nothing was written."
_tracebacks = False


def show_tracebacks(asked: bool) -> None:
    """Whether trouble shows where it happened, for the rest of the process (``featlearn --debug``)."""
    global _tracebacks
    _tracebacks = asked


def replace_what_cannot_be_shown(stream: TextIO) -> None:
    """Let a terminal or a pipe that knows no ± or é show a question mark; results are written by then."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def print_notice(text: str) -> None:
    """Tell the user something that is no trouble, on stderr: stdout is for results."""
    print(f"featlearn: {_one_line(text)}", file=sys.stderr)


@contextmanager
def handle_errors(cancel_message: str | Callable[[], str] = _NOTHING) -> Iterator[None]:
    """Run the body of a command, and turn what goes wrong into a sentence on stderr and an exit code.

    1 is trouble, 130 is Ctrl-C; 2, a wrong option, is typer's own. Warnings of the library become remarks.

    Args:
        cancel_message: A sentence for Ctrl-C: what is on disk now. Called if it is a function.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _once()
            yield
    except KeyboardInterrupt:
        _end(f"stopped. {cancel_message() if callable(cancel_message) else cancel_message}", INTERRUPTED)
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise  # typer's own way to end, and a reader of our output who has seen enough
    except (FeatlearnError, OSError) as error:
        _end(str(error), FAILED)
    except MemoryError:
        _end("there is not enough memory: take fewer rows, or close other programs", FAILED)
    except Exception as error:
        _end(f"{type(error).__name__}: {error} (featlearn --debug ... shows where)", FAILED)


def _end(sentence: str, code: int) -> None:
    if _tracebacks:
        traceback.print_exc()
    print_notice(sentence)
    raise typer.Exit(code) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _once() -> Callable[..., None]:
    """Shows each warning once: fits of several folds would say the same."""
    told: set[tuple[type[Warning], str]] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if (category, str(message)) not in told:
            told.add((category, str(message)))
            _warn(message, category, *where, **more)

    return show


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
    **_: Any,
) -> None:
    """Show a warning that is meant for users as a remark, and others only to those who look for bugs."""
    if issubclass(category, UserWarning):
        print_notice(str(message))
    elif _tracebacks:
        print_notice(f"{filename}:{lineno}: {category.__name__}: {message}")
