"""Server process of the dashboard."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from urllib.parse import quote

from featlearn._utils.validation import check_int
from featlearn.dashboard._app import create_app, require
from featlearn.dashboard._security import LOOPBACK, check_token, is_loopback
from featlearn.errors import InputError

_EVERYWHERE = ("0.0.0.0", "::", "")


def serve(
    root: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8050,
    token: str | None = None,
    hosts: Iterable[str] | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the runs in a folder and its subfolders until the process is stopped.

    Args:
        root: Folder of the runs.
        host: Address to listen on. An address that other machines can reach requires a token.
        port: Port to listen on; 0 selects a free one.
        token: Access token required from clients, as in `create_app`.
        hosts: Allowed values of the Host header. None allows the loopback names and ``host``, and any if the server
            listens on all addresses, which requires a token.
        ready: Function called with the address to open, once the server listens.

    Raises:
        InputError: If an argument is not valid, a token is missing, or the server cannot listen on the port.
    """
    require("starlette", "uvicorn", "plotly")
    _require_own(host)
    if not is_loopback(host) and token is None:
        raise InputError(
            f"host {host!r} lets other machines read your runs and requires a token. Pass one from "
            '`python -c "import secrets; print(secrets.token_urlsafe(24))"`, or use 127.0.0.1.'
        )
    check_int("port", port, 0, 65535)
    names = list(hosts) if hosts is not None else ["*"] if host in _EVERYWHERE else [*LOOPBACK, host]
    app = create_app(root, token=check_token(token), hosts=names)

    import uvicorn

    from featlearn.dashboard._connections import LimitedProtocol

    # No access log: an address may contain the token.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=LimitedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
            await super().startup(sockets)  # type: ignore[arg-type]
            if self.started and ready is not None:
                listening = self.servers[0].sockets[0].getsockname()[1] if self.servers else port
                ready(address(host, listening, token))

    try:
        with suppress(KeyboardInterrupt):  # the way to stop it
            Server(config).run()
    except SystemExit as error:
        raise InputError(f"The server could not start on {host}:{port}. Choose another port.") from error


def address(host: str, port: int, token: str | None = None) -> str:
    """Return the address to open in a browser."""
    shown = "127.0.0.1" if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


def _require_own(host: str) -> None:
    """Raise InputError unless this machine can listen on a host, on any port."""
    try:
        addresses = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, *_, place = addresses[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"host must be an address of this machine, got {host!r}. Use 127.0.0.1, or 0.0.0.0 for other machines."
        ) from error
