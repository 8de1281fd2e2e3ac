"""Access control of the dashboard: hosts, tokens and security headers."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from featlearn._utils.json import encode_json
from featlearn.errors import InputError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine on the loopback interface."""

_COOKIE = "featlearn_token"
_SHORTEST = 16

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; "
        # plotly uses style attributes, and creates a style element for its rules.
        "style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Gate:
    """ASGI middleware that accepts only GET and HEAD requests with an allowed host and the token, if there is one.

    The Host header is checked against DNS rebinding: a foreign page can make a browser send requests to this server
    under a host name that points at this machine.

    Args:
        app: Application to protect.
        hosts: Allowed values of the Host header, without port; "*" allows any.
        token: Access token that a request must have. None requires no token.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str | None) -> None:
        self._app = app
        self._hosts = {_bare(host) for host in hosts}
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or reject it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                security = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *security]
            await send(message)

        headers: dict[str, list[str]] = {}
        for key, value in scope["headers"]:
            headers.setdefault(key.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = headers.get("host", [])
        if scope["method"] not in ("GET", "HEAD"):
            return await _respond(guarded, 405, "This server is read-only. Use GET.", {"allow": "GET, HEAD"})
        if len(hosts) != 1 or not ("*" in self._hosts or _bare(hosts[0]) in self._hosts):
            names = ", ".join(sorted(self._hosts))
            return await _respond(guarded, 400, f"The host of the address must be one of {names}.")
        if self._token is None:
            return await self._app(scope, receive, guarded)
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == "token"]
        if given and self._matches(given[-1].encode()):
            rest = [(key, value) for key, value in query if key != "token"]
            return await self._set_cookie(guarded, scope, rest)
        if not self._allowed(headers):
            message = "A token is required. Open the address that `featlearn dashboard` has printed, with ?token=..."
            return await _respond(guarded, 401, message, {"www-authenticate": "Bearer"})
        return await self._app(scope, receive, guarded)

    def _allowed(self, headers: dict[str, list[str]]) -> bool:
        for value in headers.get("authorization", []):
            kind, _, token = value.partition(" ")
            if kind.lower() == "bearer" and self._matches(token.strip().encode("latin-1", "replace")):
                return True
        try:
            jar = SimpleCookie("; ".join(headers.get("cookie", [])))
        except CookieError:
            return False
        morsel = jar.get(_COOKIE)
        return morsel is not None and secrets.compare_digest(morsel.value.encode(), self._cookie().encode())

    def _matches(self, given: bytes) -> bool:
        return self._token is not None and secrets.compare_digest(given, self._token)

    def _cookie(self) -> str:
        return hashlib.sha256(b"featlearn dashboard " + (self._token or b"")).hexdigest()

    async def _set_cookie(self, send: Send, scope: Scope, rest: list[tuple[str, str]]) -> None:
        """Store the token as a cookie, and redirect to the address without it, which the browser shows and stores."""
        path = "/" + scope["path"].lstrip("/")  # two slashes would be another host
        where = path.encode("ascii", "ignore").decode() if path.isprintable() and "\\" not in path else "/"
        where += f"?{urlencode(rest)}" if rest else ""
        cookie = f"{_COOKIE}={self._cookie()}; HttpOnly; SameSite=Strict; Path=/"
        await _respond(send, 303, "See the new location.", {"location": where, "set-cookie": cookie})


def check_token(token: str | None) -> str | None:
    """Return a token that is long enough, or None; raise InputError for another one."""
    if token is not None and (not isinstance(token, str) or len(token) < _SHORTEST or not token.isascii()):
        raise InputError(
            f"token must have at least {_SHORTEST} ASCII characters. "
            'Create one with `python -c "import secrets; print(secrets.token_urlsafe(24))"`.'
        )
    return token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    bare = _bare(host)
    return bare in LOOPBACK or bare == "::1" or (bare.startswith("127.") and bare.replace(".", "").isdigit())


def _bare(host: str) -> str:
    """Return a host without its port, in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name if name.count(":") > 1 else name.partition(":")[0]


async def _respond(send: Send, status: int, message: str, headers: dict[str, str] | None = None) -> None:
    body = encode_json({"error": message})
    named = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
    listed = [(k.encode(), v.encode("latin-1")) for k, v in {**named, **(headers or {})}.items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})
