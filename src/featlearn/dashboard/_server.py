"""Serve the dashboard as a process of its own."""

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
    """Serve the runs at and under a folder until the process is stopped.

    Args:
        root: The folder.
        host: Where to listen; another than this machine's own needs a token.
        port: Where to listen; 0 takes a free one.
        token: See `create_app`.
        hosts: Names that requests may call the server by; None is this machine's own names and ``host``, and any where
            the server listens everywhere, which the token guards.
        ready: Is called with the address to open, once the server listens.
    """
    require("starlette", "uvicorn", "plotly")
    _require_own(host)
    if not is_loopback(host) and token is None:
        raise InputError(
            f"on host {host!r} other machines can read your runs: give a token, "
            'such as `python -c "import secrets; print(secrets.token_urlsafe(24))"` prints, or stay on 127.0.0.1'
        )
    check_int("port", port, 0, 65535)
    names = list(hosts) if hosts is not None else ["*"] if host in _EVERYWHERE else [*LOOPBACK, host]
    app = create_app(root, token=check_token(token), hosts=names)

    import uvicorn

    # No log of requests: an address may hold the token.
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, server_header=False)

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
        raise InputError(f"the server could not start on {host}:{port}: choose another port with --port") from error


def address(host: str, port: int, token: str | None = None) -> str:
    """The address to open in a browser."""
    shown = "127.0.0.1" if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


def _require_own(host: str) -> None:
    """Raise unless this machine can listen on a host, whatever the port."""
    try:
        family, kind, *_, place = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"host {host!r} is no address of this machine: take 127.0.0.1, or 0.0.0.0 to be asked by other machines"
        ) from error
