"""The server's pages and data: GET only, nothing is ever written."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featlearn._utils.json import encode_json
from featlearn.dashboard import _api as answers
from featlearn.dashboard._matrix_data import SIDE, matrix
from featlearn.dashboard._run_index import Store, signature
from featlearn.dashboard._security import LOOPBACK, Gate, check_token
from featlearn.dashboard._spectrum_data import spectra_at, spectrum
from featlearn.errors import FeatlearnError, InputError, NotThereError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Answer = Callable[["Request"], Any]
_LOG = logging.getLogger("featlearn")


def create_app(root: str | os.PathLike[str], *, token: str | None = None, hosts: Iterable[str] = LOOPBACK) -> Starlette:
    """The dashboard of the runs at and under a folder, as an ASGI application.

    Args:
        root: The folder.
        token: A secret that every request must bring: as ``?token=`` once, which becomes a cookie, or as
            ``Authorization: Bearer``.
        hosts: Names that requests may call the server by, without port; ``"*"`` is any.
    """
    require("starlette", "plotly")
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.responses import FileResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    store = Store(root)
    plotly = plotly_script()

    def data(path: str, answer: Answer) -> Route:
        # A plain function: Starlette calls it in a thread, and a long look holds nobody else up.
        def endpoint(request: Request) -> Response:
            try:
                body, status = encode_json(answer(request)), 200
            except NotThereError as error:
                body, status = encode_json({"error": store.redact_error(error)}), 404
            except (FeatlearnError, OSError) as error:
                body, status = encode_json({"error": store.redact_error(error)}), 400
            except Exception as error:  # a mistake of ours: the page tells it in a sentence, and the log where it is
                _LOG.warning("the dashboard could not answer %s", request.url.path, exc_info=True)
                body, status = encode_json({"error": store.redact_error(error)}), 500
            return Response(body, status, {"cache-control": "no-store"}, "application/json")

        return Route(f"/api/{path}", endpoint, methods=["GET"])

    def shell(_: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    def plotting(_: Request) -> Response:
        return FileResponse(plotly, media_type="text/javascript", headers={"cache-control": "max-age=86400"})

    async def nothing_here(_: Request, __: Exception) -> Response:
        return Response(encode_json({"error": "there is no such page"}), 404, media_type="application/json")

    routes = [
        Route("/", shell, methods=["GET"]),
        Route("/plotly.min.js", plotting, methods=["GET"]),
        Mount("/static", StaticFiles(directory=STATIC)),
        *(data(path, answer) for path, answer in _data(store).items()),
    ]
    gate = Middleware(Gate, hosts=list(hosts), token=check_token(token))
    app = Starlette(
        routes=routes,
        middleware=[gate, Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)],
        exception_handlers={404: nothing_here, 405: nothing_here},
    )
    app.router.redirect_slashes = False  # an address is right or it is not
    return app


def _data(store: Store) -> dict[str, Answer]:
    """Addresses under /api, and what answers them."""

    def runs(request: Request) -> Any:
        check_params(request)
        return answers.run_list(store)

    def details(request: Request) -> Any:
        check_params(request)
        return answers.details(store, store.find(request.path_params["id"]))

    def series(request: Request) -> Any:
        values = check_params(request, "name", "layer", "width", "from", "to", "log")
        run = store.find(request.path_params["id"])
        asked = (
            text_param(values, "name", needed=True) or "",
            text_param(values, "layer"),
            int_param(values, "width", 10, 4000, 800) or 800,
            int_param(values, "from", 0, LAST_STEP, None),
            int_param(values, "to", 0, LAST_STEP, None),
            bool(int_param(values, "log", 0, 1, 0)),
        )
        # The text itself is kept: to write twenty long curves as JSON takes longer than to read a short one.
        make = partial(answers.series, store, run, *asked)
        return store.long_texts.get(("series", run.id, *asked), signature(*run.files), lambda: encode_json(make()))

    def words(request: Request) -> Any:
        check_params(request)
        return answers.phases_over_time(store, store.find(request.path_params["id"]))

    def one_matrix(request: Request) -> Any:
        values = check_params(request, "group", "most")
        run = store.find(request.path_params["id"])
        group = int_param(values, "group", 0, 100_000, 0) or 0
        most = int_param(values, "most", 8, SIDE, SIDE) or SIDE
        step = step_param(request.path_params["step"])
        return matrix(store, run, step, request.path_params["name"], group=group, most=most)

    def spectra(request: Request) -> Any:
        values = check_params(request, "layer", "kind")
        run, step = store.find(request.path_params["id"]), step_param(request.path_params["step"])
        kind = text_param(values, "kind")
        if kind is None:
            return {"step": step, "spectra": spectra_at(store, run, step)}
        return spectrum(store, run, step, text_param(values, "layer") or None, kind)

    def changes(request: Request) -> Any:
        values = check_params(request, "after")
        return answers.changes(store, store.find(request.path_params["id"]), text_param(values, "after") or "")

    def compare(request: Request) -> Any:
        values = check_params(request, "ids", "name", "layer", "width")
        return answers.compare(
            store,
            ids_param(values, "ids"),
            text_param(values, "name"),
            text_param(values, "layer"),
            int_param(values, "width", 10, 4000, 800) or 800,
        )

    def ledger(request: Request) -> Any:
        check_params(request)
        return answers.ledger(store)

    return {
        "runs": runs,
        "runs/{id}": details,
        "runs/{id}/series": series,
        "runs/{id}/words": words,
        "runs/{id}/matrices/{step}/{name:path}": one_matrix,
        "runs/{id}/spectra/{step}": spectra,
        "runs/{id}/changes": changes,
        "compare": compare,
        "ledger": ledger,
    }


if TYPE_CHECKING:
    from starlette.requests import Request

_LONGEST = 500
LAST_STEP = 2**63 - 1


def check_params(request: Request, *names: str) -> Mapping[str, str]:
    """The values of a request, which may have these names."""
    for name in request.query_params:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise InputError(f"{name[:60]!r} is not a parameter here: there are {listed}")
    return request.query_params


def text_param(values: Mapping[str, str], name: str, *, needed: bool = False) -> str | None:
    """A text of a sane length, or None."""
    value = values.get(name)
    if value is None:
        if needed:
            raise InputError(f"{name} is missing: add ?{name}=...")
        return None
    if len(value) > _LONGEST or "\0" in value:
        raise InputError(f"{name} must be a text of at most {_LONGEST} letters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} must be text that can be written as UTF-8") from None
    return value


def int_param(values: Mapping[str, str], name: str, least: int, most: int, default: int | None) -> int | None:
    """An integer within limits, or the default."""
    value = values.get(name)
    if value is None or value == "":
        return default
    if not re.fullmatch(r"[0-9]{1,19}", value) or not least <= int(value) <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {value[:40]!r}")
    return int(value)


def step_param(value: str, name: str = "step") -> int:
    """A step."""
    found = int_param({name: value}, name, 0, LAST_STEP, None)
    if found is None:
        raise InputError(f"{name} is missing")
    return found


def ids_param(values: Mapping[str, str], name: str) -> list[str]:
    """Identifiers of runs with commas between them."""
    text = text_param(values, name, needed=True) or ""
    found = [part for part in text.split(",") if part]
    if any(not re.fullmatch(r"[0-9a-f]{12}", part) for part in found):
        raise InputError(f"{name} must be identifiers of runs, with commas between them")
    return found


STATIC = Path(__file__).parent / "static"


def require(*packages: str) -> None:
    """Raise unless these packages are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the dashboard needs {', '.join(missing)}: install with `pip install 'featlearn[dashboard]'`, or in a "
            "clone with `pip install -c constraints.txt -e '.[dashboard]'`"
        )


def plotly_script() -> Path:
    """The script that comes with the plotly package: nothing is fetched from elsewhere."""
    require("plotly")
    found = find_spec("plotly")  # importing it would take a second
    places = [] if found is None else list(found.submodule_search_locations or [])
    for place in places:
        script = Path(place) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise InputError("the installed plotly has no plotly.min.js: install it again with `pip install -U plotly`")
