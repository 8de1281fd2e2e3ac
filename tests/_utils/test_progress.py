import io
from contextlib import redirect_stderr

import pytest
import torch

from featlearn._utils.progress import progress_bar
from featlearn.models import mlp
from featlearn.training import fit


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _colors(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def shown(enabled=True, stream=None):
    stream = Terminal() if stream is None else stream
    with redirect_stderr(stream), progress_bar(4, "counting", enabled) as advance:
        advance()
        advance(3)
    return stream.getvalue()


def test_shown_on_a_terminal_only(capsys):
    text = shown()
    assert "counting" in text
    assert "4/4" in text
    assert shown(enabled=False) == ""
    assert shown(stream=io.StringIO()) == ""
    assert capsys.readouterr().out == ""


def test_an_inner_bar_is_quiet():
    with redirect_stderr(Terminal()) as stream, progress_bar(1, "outer"), progress_bar(1, "inner") as advance:
        advance()
    assert "outer" in stream.getvalue()
    assert "inner" not in stream.getvalue()


def test_an_error_frees_the_terminal():
    def fail():
        with redirect_stderr(Terminal()), progress_bar(1, "outer"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "counting" in shown()


def test_fit_shows_it_when_asked():
    X = torch.ones(4, 2)
    for progress in (False, True):
        with redirect_stderr(Terminal()) as stream:
            fit(mlp([2, 2]), (X, X), lr=0.01, steps=3, progress=progress)
        assert ("training" in stream.getvalue()) == progress
