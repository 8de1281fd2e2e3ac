"""``featlearn dashboard``: runs in a browser, live."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from featlearn.cli._console import print_files, print_json, result_console
from featlearn.cli._errors import handle_errors, print_notice
from featlearn.errors import InputError


def dashboard(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, with all folders below it.")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8050,
    host: Annotated[str, typer.Option(help="Address to listen on; this machine alone by default.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="A word that visitors must know.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write one .html file instead, and end.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --export: name the file as JSON.")] = False,
) -> None:
    """Show runs in a browser while they are being written; Ctrl-C ends it.

    Examples:
      featlearn dashboard demo --open
      featlearn dashboard runs --port 9000 --host 0.0.0.0 --token a-long-secret-word
      featlearn dashboard runs --export runs.html
    """
    with handle_errors("The runs are as they were."):
        if not folder.is_dir():
            raise InputError(f"there is no folder {str(folder)!r}: name one that holds runs")
        try:
            server = importlib.import_module("featlearn.dashboard")
        except ImportError as error:
            missing = error.name or "a package"
            raise InputError(
                f"the dashboard needs {missing}, which is not installed: call pip install 'featlearn[dashboard]'"
            ) from error
        if export is not None:
            server.export_html(folder, export)
            if as_json:
                print_json({"page": str(export)})
            else:
                print_files(result_console(), [(export, "all runs on one page")])
            return

        def ready(address: str) -> None:
            print_notice(f"runs of {folder} on {address}, until Ctrl-C")
            if show:
                import webbrowser

                webbrowser.open(address)

        server.serve(folder, host=host, port=port, token=token, ready=ready)
