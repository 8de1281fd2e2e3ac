"""Application of the dashboard: its pages and data, read-only."""

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
from featlearn.dashboard._finding_data import findings
from featlearn.dashboard._matrix_data import SIDE, matrix
from featlearn.dashboard._run_index import Store, signature
from featlearn.dashboard._run_list import BUDGET, RunList
from featlearn.dashboard._security import LOOPBACK, Gate, check_token
from featlearn.dashboard._spectrum_data import spectra_at, spectrum
from featlearn.errors import FeatlearnError, InputError, NotThereError
from featlearn.runs._axes import AXES

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Values = Mapping[str, str]
Answer = Callable[[Values, Values], Any]
"""Function of the query parameters and the path parameters of a request."""

_LOG = logging.getLogger("featlearn")


def create_app(root: str | os.PathLike[str], *, token: str | None = None, hosts: Iterable[str] = LOOPBACK) -> Starlette:
    """Create the dashboard of the runs in a folder and its subfolders, as an ASGI application.

    Args:
        root: Folder of the runs.
        token: Access token that each request must have: as ``?token=`` once, which becomes a cookie, or as
            ``Authorization: Bearer``. None requires no token.
        hosts: Allowed values of the Host header, without port; ``"*"`` allows any.

    Returns:
        The application.

    Raises:
        InputError: If the folder does not exist, a package is missing, or the token is too short.

    Example:
        >>> import tempfile
        >>> from starlette.testclient import TestClient
        >>> from featlearn.dashboard import create_app
        >>> from featlearn.runs import Run
        >>> folder = tempfile.mkdtemp()
        >>> Run.create(f"{folder}/first").finish()
        >>> client = TestClient(create_app(folder), base_url="http://127.0.0.1")
        >>> [(run["name"], run["status"]) for run in client.get("/api/runs").json()["runs"]]
        [('first', 'finished')]
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

    def data(path: str, names: tuple[str, ...], answer: Answer) -> Route:
        # A plain function: Starlette calls it in a thread, so that a long read does not block other requests.
        def endpoint(request: Request) -> Response:
            try:
                body, status = encode_json(answer(check_params(request, *names), request.path_params)), 200
            except Exception as error:
                status = 404 if isinstance(error, NotThereError) else 400
                if not isinstance(error, FeatlearnError | OSError):  # a bug: the log has the traceback
                    _LOG.warning("the dashboard could not answer %s", request.url.path, exc_info=True)
                    status = 500
                body = encode_json({"error": store.redact_error(error)})
            return Response(body, status, {"cache-control": "no-store"}, "application/json")

        return Route(f"/api/{path}", endpoint, methods=["GET"])

    def shell(_: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    def plotting(_: Request) -> Response:
        return FileResponse(plotly, media_type="text/javascript", headers={"cache-control": "max-age=86400"})

    async def nothing_here(_: Request, __: Exception) -> Response:
        return Response(encode_json({"error": "The page does not exist."}), 404, media_type="application/json")

    routes = [
        Route("/", shell, methods=["GET"]),
        Route("/plotly.min.js", plotting, methods=["GET"]),
        Mount("/static", StaticFiles(directory=STATIC)),
        *(data(path, names, answer) for path, (names, answer) in _data(store).items()),
    ]
    gate = Middleware(Gate, hosts=list(hosts), token=check_token(token))
    app = Starlette(
        routes=routes,
        middleware=[gate, Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)],
        exception_handlers={404: nothing_here, 405: nothing_here},
    )
    app.router.redirect_slashes = False  # an address with a further slash does not exist
    return app


def _data(store: Store) -> dict[str, tuple[tuple[str, ...], Answer]]:
    """Return the addresses under /api, with their query parameters and the functions that answer them."""

    def segment_of(values: Values) -> int | None:
        return int_param(values, "segment", 1, LAST_STEP, None)

    def details(values: Values, path: Values) -> Any:
        return answers.details(store, store.find(path["id"]), segment_of(values))

    def series(values: Values, path: Values) -> Any:
        run = store.find(path["id"])
        arguments = (
            text_param(values, "name", needed=True) or "",
            text_param(values, "layer"),
            width_param(values),
            *range_params(values),
            bool(int_param(values, "log", 0, 1, 0)),
            segment_of(values),
        )
        mean, layers, axis = mean_param(values), text_param(values, "layers") or "", axis_param(values)
        # The JSON itself is cached: to encode twenty long curves takes longer than to read a short one.
        make = partial(answers.series, store, run, *arguments, mean=mean, layers=layers, axis=axis)
        key = ("series", run.id, *arguments, mean, layers, axis)
        return store.long_texts.get(key, signature(*run.files), lambda: encode_json(make()))

    def words(values: Values, path: Values) -> Any:
        return answers.phases_over_time(store, store.find(path["id"]), segment_of(values))

    def found(values: Values, path: Values) -> Any:
        return findings(store, store.find(path["id"]), segment_of(values))

    def one_matrix(values: Values, path: Values) -> Any:
        group = int_param(values, "group", 0, 100_000, 0) or 0
        most = int_param(values, "most", 8, SIDE, SIDE) or SIDE
        run, step, segment = store.find(path["id"]), step_param(path), segment_of(values)
        return matrix(store, run, step, path["name"], group=group, most=most, segment=segment)

    def spectra(values: Values, path: Values) -> Any:
        run, step, kind = store.find(path["id"]), step_param(path), text_param(values, "kind")
        if kind is None:
            return {"step": step, "spectra": spectra_at(store, run, step, segment_of(values))}
        return spectrum(store, run, step, text_param(values, "layer") or None, kind, segment_of(values))

    def changes(values: Values, path: Values) -> Any:
        return answers.changes(store, store.find(path["id"]), text_param(values, "after") or "")

    def compare(values: Values, path: Values) -> Any:
        ids, name, layer = ids_param(values, "ids"), text_param(values, "name"), text_param(values, "layer")
        mean, axis = mean_param(values), axis_param(values)
        return answers.compare(
            store, ids, name, layer, width_param(values), *range_params(values), mean=mean, axis=axis
        )

    def run_list(values: Values, path: Values) -> Any:
        after = text_param(values, "after") or ""
        return listed.rows(after, BUDGET if not after else 3 * BUDGET)  # the page shows rows after the first answer

    def values_of_layer(values: Values, path: Values) -> Any:
        layer, name = (text_param(values, key, needed=True) or "" for key in ("layer", "name"))
        return listed.values(layer, name)

    listed = RunList(store)
    return {
        "runs": (("after",), run_list),
        "layers": ((), lambda values, path: listed.layers()),
        "values": (("layer", "name"), values_of_layer),
        "runs/{id}": (("segment",), details),
        "runs/{id}/series": (
            ("name", "layer", "layers", "width", "from", "to", "log", "mean", "axis", "segment"),
            series,
        ),
        "runs/{id}/words": (("segment",), words),
        "runs/{id}/findings": (("segment",), found),
        "runs/{id}/matrices/{step}/{name:path}": (("group", "most", "segment"), one_matrix),
        "runs/{id}/spectra/{step}": (("layer", "kind", "segment"), spectra),
        "runs/{id}/changes": (("after",), changes),
        "compare": (("ids", "name", "layer", "width", "from", "to", "mean", "axis"), compare),
        "ledger": ((), lambda values, path: answers.ledger(store)),
    }


_LONGEST = 500
LAST_STEP = 2**63 - 1


def check_params(request: Request, *names: str) -> Values:
    """Return the query parameters of a request, or raise InputError for one with another name."""
    for name in request.query_params:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise InputError(f"Query parameters must be among {listed}; got {name[:60]!r}.")
    return request.query_params


def text_param(values: Values, name: str, *, needed: bool = False) -> str | None:
    """Return a string parameter of limited length, or None."""
    value = values.get(name)
    if value is None:
        if needed:
            raise InputError(f"{name} is missing. Add ?{name}=...")
        return None
    if len(value) > _LONGEST or "\0" in value:
        raise InputError(f"{name} must be text of at most {_LONGEST} characters.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} must be valid UTF-8.") from None
    return value


def int_param(values: Values, name: str, least: int, most: int, default: int | None) -> int | None:
    """Return an integer parameter within limits, or the default."""
    value = values.get(name)
    if value is None or value == "":
        return default
    if not re.fullmatch(r"[0-9]{1,19}", value) or not least <= int(value) <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {value[:40]!r}.")
    return int(value)


def width_param(values: Values) -> int:
    """Return the width of a figure in pixels."""
    return int_param(values, "width", 10, 4000, 800) or 800


def range_params(values: Values) -> tuple[int | None, int | None]:
    """Return the first and the last step that are requested."""
    first, last = (int_param(values, name, 0, LAST_STEP, None) for name in ("from", "to"))
    return first, last


def mean_param(values: Values) -> bool:
    """Return whether means of values are requested."""
    return bool(int_param(values, "mean", 0, 1, 0))


def axis_param(values: Values) -> str:
    """Return the axis of the values, the steps by default."""
    axis = text_param(values, "axis") or AXES[0]
    if axis not in AXES:
        raise InputError(f"axis must be one of {', '.join(AXES)}, got {axis[:40]!r}.")
    return axis


def step_param(path: Values) -> int:
    """Return the step in the path of a request."""
    step = int_param(path, "step", 0, LAST_STEP, None)
    if step is None:
        raise InputError("step is missing.")
    return step


def ids_param(values: Values, name: str) -> list[str]:
    """Return identifiers of runs, which are separated by commas."""
    given = values.get(name)
    if given is None:
        raise InputError(f"{name} is missing. Add ?{name}=...")
    ids = [part for part in given.split(",") if part]
    if any(not re.fullmatch(r"[0-9a-f]{12}", part) for part in ids):
        raise InputError(f"{name} must be identifiers of runs, separated by commas.")
    return ids


STATIC = Path(__file__).parent / "static"


def require(*packages: str) -> None:
    """Raise InputError unless these packages are installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise InputError(
            f"The dashboard requires {', '.join(missing)}. Run `pip install 'featlearn[dashboard]'`, or in a clone "
            "`pip install -c constraints.txt -e '.[dashboard]'`."
        )


def plotly_script() -> Path:
    """Return the script of the installed plotly package, so that nothing is downloaded."""
    require("plotly")
    spec = find_spec("plotly")  # importing it would take a second
    for place in [] if spec is None else spec.submodule_search_locations or []:
        script = Path(place) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise InputError("The installed plotly has no plotly.min.js. Run `pip install -U plotly`.")
