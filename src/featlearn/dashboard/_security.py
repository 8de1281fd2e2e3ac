"""Who may ask, and what a browser may do with the answer."""

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
"""Names of this machine for itself."""

_COOKIE = "featlearn_token"
_SHORTEST = 16

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; "
        # plotly sets the sizes of its parts as style attributes, and its rules in a style element that it makes.
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
    """Lets requests through that read, that name a host we are, and that bring the token if there is one.

    A page of somebody else can make a browser ask this server, also under a name of its own that it has pointed at
    this machine (DNS rebinding): hence the look at the Host header.

    Args:
        app: What to guard.
        hosts: Names that a request may call us by, without port; "*" is any.
        token: A secret that a request must bring, or None.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str | None) -> None:
        self._app = app
        self._hosts = {_bare(host) for host in hosts}
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await _close(send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        headers = _headers(scope)
        hosts = headers.get("host", [])
        if scope["method"] not in ("GET", "HEAD"):
            return await _refuse(guarded, 405, "this server only reads: ask with GET", {"allow": "GET, HEAD"})
        if len(hosts) != 1 or not ("*" in self._hosts or _bare(hosts[0]) in self._hosts):
            names = ", ".join(sorted(self._hosts))
            return await _refuse(guarded, 400, f"this server goes by {names}, and was asked for by another name")
        if self._token is None:
            return await self._app(scope, receive, guarded)
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == "token"]
        if given and self._knows(given[-1].encode()):
            rest = [(key, value) for key, value in query if key != "token"]
            return await self._welcome(guarded, scope, rest)
        if not self._allowed(headers):
            words = "a token is needed: open the address that `featlearn dashboard` has printed, with ?token=..."
            return await _refuse(guarded, 401, words, {"www-authenticate": "Bearer"})
        return await self._app(scope, receive, guarded)

    def _allowed(self, headers: dict[str, list[str]]) -> bool:
        for value in headers.get("authorization", []):
            kind, _, token = value.partition(" ")
            if kind.lower() == "bearer" and self._knows(token.strip().encode("latin-1", "replace")):
                return True
        try:
            jar = SimpleCookie("; ".join(headers.get("cookie", [])))
        except CookieError:
            return False
        morsel = jar.get(_COOKIE)
        return morsel is not None and secrets.compare_digest(morsel.value.encode(), self._cookie().encode())

    def _knows(self, given: bytes) -> bool:
        return self._token is not None and secrets.compare_digest(given, self._token)

    def _cookie(self) -> str:
        return hashlib.sha256(b"featlearn dashboard " + (self._token or b"")).hexdigest()

    async def _welcome(self, send: Send, scope: Scope, rest: list[tuple[str, str]]) -> None:
        """Keep the token as a cookie, and take it out of the address that is seen and kept in the history."""
        path = "/" + scope["path"].lstrip("/")  # two slashes would name another host
        where = path.encode("ascii", "ignore").decode() if path.isprintable() and "\\" not in path else "/"
        where += f"?{urlencode(rest)}" if rest else ""
        cookie = f"{_COOKIE}={self._cookie()}; HttpOnly; SameSite=Strict; Path=/"
        await _refuse(send, 303, "go on", {"location": where, "set-cookie": cookie})


def check_token(token: str | None) -> str | None:
    """A token that cannot be guessed, or None."""
    if token is not None and (not isinstance(token, str) or len(token) < _SHORTEST or not token.isascii()):
        raise InputError(
            f"a token must have at least {_SHORTEST} letters and digits: "
            'make one with `python -c "import secrets; print(secrets.token_urlsafe(24))"`'
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can ask under a host."""
    bare = _bare(host)
    return bare in LOOPBACK or bare == "::1" or (bare.startswith("127.") and bare.replace(".", "").isdigit())


def _bare(host: str) -> str:
    """A host without its port, in small letters."""
    name = host.strip().lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name if name.count(":") > 1 else name.partition(":")[0]


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in scope["headers"]:
        found.setdefault(key.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


async def _refuse(send: Send, status: int, words: str, headers: dict[str, str] | None = None) -> None:
    body = encode_json({"error": words})
    named = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
    listed = [(k.encode(), v.encode("latin-1")) for k, v in {**named, **(headers or {})}.items()]
    await send({"type": "http.response.start", "status": status, "headers": listed})
    await send({"type": "http.response.body", "body": body})


async def _close(send: Send) -> None:
    await send({"type": "websocket.close", "code": 1000})
