"""Command ``featlearn`` and its subcommands.

Subcommands import the library when they are called, so that ``--help`` and shell completion do not wait for torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from featlearn.cli._dashboard import dashboard
from featlearn.cli._errors import replace_unsupported_characters, show_tracebacks
from featlearn.cli._fit import fit
from featlearn.cli._predict import predict
from featlearn.cli._probe import probe
from featlearn.cli._reproduce import reproduce
from featlearn.cli._runs import runs
from featlearn.cli._spectra import spectra
from featlearn.cli.demo import demo

app = typer.Typer(help="Measure feature learning.", no_args_is_help=True, pretty_exceptions_enable=False)

for command in (demo, probe, spectra, fit, predict, reproduce):
    app.command()(command)
app.add_typer(runs, name="runs")
app.command()(dashboard)


def _print_version(asked: bool) -> None:
    if asked:
        from featlearn import __version__

        print(f"featlearn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback for errors.")] = False,
) -> None:
    """Measure feature learning, and use it.

    Each command has its own --help, with examples. Results go to stdout,
    messages to stderr; --json prints a result for programs.
    Exit codes: 0 success, 1 error (a sentence on stderr), 2 wrong option,
    130 Ctrl-C.

    Examples:
      featlearn demo --open
      featlearn fit table.csv --target price
      featlearn fit --help
    """
    show_tracebacks(debug)
    replace_unsupported_characters(sys.stdout)
