"""Errors of commands: one sentence on stderr, and an exit code for scripts."""

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
"""Exit code of a process that was ended by Ctrl-C: 128 plus the number of the signal."""

_tracebacks = False


def show_tracebacks(asked: bool) -> None:
    """Set whether errors print a traceback, for the rest of the process (``featlearn --debug``)."""
    global _tracebacks
    _tracebacks = asked


def replace_unsupported_characters(stream: TextIO) -> None:
    """Print a question mark for characters that the terminal or pipe does not support, such as ± or é."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def print_notice(text: str) -> None:
    """Print a message on stderr, in one line; stdout is for results."""
    print(f"featlearn: {' '.join(text.split())}", file=sys.stderr)


@contextmanager
def handle_errors(cancel_message: str | Callable[[], str] = "Nothing was written.") -> Iterator[None]:
    """Run the body of a command, and turn errors into a sentence on stderr and an exit code.

    The exit code is 1 for an error and 130 for Ctrl-C; typer exits with 2 for a wrong option. Warnings of the library
    become messages, each of them once.

    Args:
        cancel_message: Sentence for Ctrl-C about the files on disk, or a function that returns it.
    """
    shown: set[tuple[type[Warning], str]] = set()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if (category, str(message)) in shown:
            return
        shown.add((category, str(message)))
        if issubclass(category, UserWarning):
            print_notice(str(message))
        elif _tracebacks:  # warnings for developers
            print_notice(f"{filename}:{lineno}: {category.__name__}: {message}")

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    except KeyboardInterrupt:
        _end(f"stopped. {cancel_message() if callable(cancel_message) else cancel_message}", INTERRUPTED)
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise  # handled by typer; a broken pipe means that the reader of the output has ended
    except (FeatlearnError, OSError) as error:
        _end(str(error), FAILED)
    except MemoryError:
        _end("There is not enough memory. Use fewer rows, or close other programs.", FAILED)
    except Exception as error:
        _end(f"{type(error).__name__}: {error} (featlearn --debug ... shows the traceback)", FAILED)


def _end(sentence: str, code: int) -> None:
    if _tracebacks:
        traceback.print_exc()
    print_notice(sentence)
    raise typer.Exit(code) from None
