"""Connections with real sockets: half-open ones are closed, and slow or repeated requests are answered."""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from dashboard_runs import trained_run

pytest.importorskip("starlette")
pytest.importorskip("plotly")
pytest.importorskip("uvicorn")
import uvicorn

from featlearn.dashboard import create_app
from featlearn.dashboard._connections import LimitedProtocol

MANY = 300
PATIENCE = 30.0


class Hasty(LimitedProtocol):
    """Limits that a test can wait for."""

    request_seconds = 1.5
    answer_seconds = 1.5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[uvicorn.Server]:
    root = tmp_path_factory.mktemp("served")
    trained_run(root, "run").finish()
    options = {"host": "127.0.0.1", "port": 0, "log_level": "critical", "access_log": False, "ws": "none"}
    result = uvicorn.Server(uvicorn.Config(create_app(root), http=Hasty, timeout_keep_alive=60, **options))
    thread = threading.Thread(target=result.run, daemon=True)
    thread.start()
    until(lambda: result.started)
    yield result
    result.should_exit = True
    thread.join(PATIENCE)


def until(condition: object) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def place(server: uvicorn.Server) -> tuple[str, int]:
    return server.servers[0].sockets[0].getsockname()[:2]


def is_closed(client: socket.socket) -> bool:
    """Whether the server has ended the connection, which then has something to read: its end."""
    if not select.select([client], [], [], 0)[0]:
        return False
    try:
        return client.recv(65536) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /api/runs HT", b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ", b"\r\n"],
    ids=["nothing", "half a line", "half a head", "an empty line"],
)
def test_half_requests_are_dropped_and_others_answered_meanwhile(server: uvicorn.Server, sent: bytes) -> None:
    clients = [socket.create_connection(place(server)) for _ in range(MANY)]
    try:
        for client in clients:
            client.sendall(sent)
        honest = http.client.HTTPConnection(*place(server), timeout=PATIENCE)
        honest.request("GET", "/api/runs")
        assert honest.getresponse().read().startswith(b"{")
        left = set(clients)
        until(lambda: not left.difference_update([client for client in left if is_closed(client)]) and not left)
        honest.request(
            "GET", "/api/runs"
        )  # a connection that was kept alive is not cut by the limit of its first request
        assert honest.getresponse().status == 200
        honest.close()
        until(lambda: len(server.server_state.connections) == 0)
    finally:
        for client in clients:
            client.close()


def test_a_request_of_many_small_pieces_is_answered(server: uvicorn.Server) -> None:
    with socket.create_connection(place(server)) as client:
        for piece in (b"GE", b"T /api/runs HT", b"TP/1.1\r\nHo", b"st: 127.0.0.1\r\n", b"\r\n"):
            client.sendall(piece)
            time.sleep(0.05)
        client.settimeout(PATIENCE)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_pieces_without_an_end_do_not_extend_the_time(server: uvicorn.Server) -> None:
    with socket.create_connection(place(server)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")

        def dropped() -> bool:
            try:
                client.sendall(b"X: y\r\n")
            except ConnectionError:
                return True
            return is_closed(client)

        until(dropped)


def test_a_second_request_that_stays_half_is_dropped(server: uvicorn.Server) -> None:
    with socket.create_connection(place(server)) as client:
        client.sendall(b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        client.settimeout(PATIENCE)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /api/ru")  # ends the time of uvicorn for idle connections
        until(lambda: is_closed(client))


def test_a_client_that_reads_nothing_is_dropped(server: uvicorn.Server) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(place(server))
        request = b"GET /plotly.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        client.sendall(request * 20)
        until(lambda: len(server.server_state.connections) == 1)
        until(lambda: len(server.server_state.connections) == 0)


def test_a_slow_reader_gets_everything(server: uvicorn.Server) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.settimeout(PATIENCE)
        client.connect(place(server))
        client.sendall(b"GET /plotly.min.js HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        size, pauses = 0, 40
        while part := client.recv(262_144):
            size += len(part)
            if pauses:
                pauses -= 1
                time.sleep(0.02)
        assert size > 1_000_000
