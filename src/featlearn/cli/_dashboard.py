"""Command ``featlearn dashboard``, which shows runs in a browser, live."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from featlearn.cli._console import print_files, print_json, result_console
from featlearn.cli._errors import handle_errors, print_notice
from featlearn.errors import InputError


def dashboard(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, including its subfolders.")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8050,
    host: Annotated[str, typer.Option(help="Address to listen on. Default: this machine only.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="Access token required from clients.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the dashboard in a browser.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write one .html file and exit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --export: print the file name as JSON.")] = False,
) -> None:
    """Show runs in a browser, live. Stop it with Ctrl-C.

    Examples:
      featlearn dashboard demo --open
      featlearn dashboard runs --port 9000 --host 0.0.0.0 --token a-long-secret-word
      featlearn dashboard runs --export runs.html
    """
    with handle_errors("The runs are not changed."):
        if not folder.is_dir():
            raise InputError(f"FOLDER must be an existing folder with runs, got {str(folder)!r}.")
        try:
            server = importlib.import_module("featlearn.dashboard")
        except ImportError as error:
            raise InputError(
                f"The dashboard requires {error.name or 'a package'}, which is not installed. "
                "Run pip install 'featlearn[dashboard]'."
            ) from error
        if export is not None:
            server.export_html(folder, export)
            if as_json:
                print_json({"page": str(export)})
            else:
                print_files(result_console(), [(export, "all runs on one page")])
            return

        def ready(address: str) -> None:
            print_notice(f"serving the runs of {folder} at {address}; press Ctrl-C to stop")
            if show:
                import webbrowser

                webbrowser.open(address)

        server.serve(folder, host=host, port=port, token=token, ready=ready)
