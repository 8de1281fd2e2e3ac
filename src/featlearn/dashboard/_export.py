"""Export of the dashboard to one HTML file that contains its data."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from featlearn._utils.atomic import atomic_write, file_trouble
from featlearn._utils.json import encode_utf8, to_json
from featlearn.dashboard import _api as answers
from featlearn.dashboard._app import STATIC, plotly_script
from featlearn.dashboard._finding_data import findings
from featlearn.dashboard._matrix_data import matrix
from featlearn.dashboard._run_index import Found, Store
from featlearn.dashboard._run_list import RunList
from featlearn.dashboard._spectrum_data import spectrum
from featlearn.errors import InputError, NotThereError
from featlearn.runs._axes import positions
from featlearn.runs.database import DATABASE_FILE

_WIDTH = 400
_AXIS_STEPS = 2000
_SIDE = 64
_STEPS = 12  # with matrices, in a run of one segment
_FEWEST_STEPS = 3
_SEGMENTS = 8
_MATRICES = 24
_IMPORT = re.compile(r'^import\s+\{[^}]*\}\s+from\s+"\./([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async function|function|const)", re.MULTILINE)


def export_html(root_or_run: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write the dashboard of a folder, or of one run, as one file that works without a server and offline.

    Curves are reduced to 400 values, matrices to 64 rows and columns at 12 steps, and runs to their latest 8 segments;
    the pages indicate it.

    Args:
        root_or_run: Folder of runs, or folder of one run.
        path: File that ends in .html. An existing file is replaced.

    Returns:
        Path of the file.

    Raises:
        InputError: If the file has another ending, or the folder does not exist.
        RunStoreError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> from featlearn.dashboard import export_html
        >>> from featlearn.runs import Run
        >>> folder = tempfile.mkdtemp()
        >>> with Run.create(f"{folder}/first") as run:
        ...     run.log(0, {"loss": 0.5})
        >>> page = export_html(folder, f"{folder}/runs.html")
        >>> page.name, "first" in page.read_text(encoding="utf-8")
        ('runs.html', True)
    """
    target = Path(path)
    if target.suffix.lower() != ".html":
        raise InputError(f"path must be a file that ends in .html, got {os.fspath(path)!r}.")
    store = Store(root_or_run)
    script = plotly_script().read_text(encoding="utf-8")
    content = {"answers": _answers(store), "single": (store.root / DATABASE_FILE).is_file()}
    page = _page(encode_utf8(store.root.name), script, content)
    with file_trouble(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as draft:
            draft.write_text(page, encoding="utf-8")
    return target


def bundle() -> str:
    """Return the modules of the pages as one script, each after the modules that it imports.

    Top-level names are unique over all modules, so that their code without imports is one module.
    """
    parts: dict[str, str] = {}
    begun: set[str] = set()

    def add(name: str) -> None:
        if name in begun:
            return
        begun.add(name)
        source = (STATIC / name).read_text(encoding="utf-8")
        for inner in _IMPORT.findall(source):
            add(inner)
        parts[name] = _EXPORT.sub("", _IMPORT.sub("", source))

    add("main.js")
    return "\n".join(parts.values())


def _page(title: str, plotly: str, content: dict[str, Any]) -> str:
    scripts = [plotly.replace("</script", "<\\/script"), bundle()]
    if "</script" in scripts[1]:
        raise AssertionError("a script of the dashboard contains the end of its element")
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">\n'
        f'<title>{escape(title)}: featlearn</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n'
        f'</head>\n<body>\n<div id="app"></div>\n<script type="application/json" id="held">{data}</script>\n'
        f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n</body>\n</html>\n'
    )


def _answers(store: Store) -> dict[str, Any]:
    """Return all data of the pages, by address."""
    listed = RunList(store)
    result: dict[str, Any] = {"runs": listed.rows(seconds=None), "layers": listed.layers()}
    if result["runs"]["ledger"]:
        result["ledger"] = answers.ledger(store)
    for run in store.runs():
        try:
            result |= _answers_of(store, run)
        except Exception as error:  # other runs are unaffected
            result[f"runs/{run.id}"] = store.summary(run) | {"trouble": store.redact_error(error)}
    return {address: to_json(answer) for address, answer in result.items()}


def _answers_of(store: Store, run: Found) -> dict[str, Any]:
    """Return the data of a run: of its latest segment, and of the segments before it."""
    count = len(answers.details(store, run).get("segment_list", ()))
    segments = [None, *range(count - 1, max(count - _SEGMENTS, 0), -1)]
    result: dict[str, Any] = {}
    for segment in segments:
        result |= _answers_of_segment(store, run, segment, max(_STEPS // len(segments), _FEWEST_STEPS))
    result[f"runs/{run.id}"]["file_segments"] = len(segments)
    return result


def _answers_of_segment(store: Store, run: Found, segment: int | None, most_steps: int) -> dict[str, Any]:
    """Return the data of a segment of a run by address; None is the latest one."""
    root, asked = f"runs/{run.id}", {} if segment is None else {"segment": segment}
    details = answers.details(store, run, segment)
    result: dict[str, Any] = {_address(root, **asked): details}
    if details["status"] == "unreadable":
        return result
    result[_address(f"{root}/words", **asked)] = answers.phases_over_time(store, run, segment)
    result[_address(f"{root}/findings", **asked)] = findings(store, run, segment)
    shown: set[int] = set()
    for name in dict.fromkeys([*details["quantities"], *(n for names in details["layers"].values() for n in names)]):
        try:
            whole = answers.series(store, run, name, width=_WIDTH, segment=segment)
        except NotThereError:  # another segment has it
            continue
        result[_address(f"{root}/series", name=name, **asked)] = whole
        shown.update(*(curve["steps"].tolist() for curve in whole["curves"]))
        if any(curve["reduced"] for curve in whole["curves"]):
            means = answers.series(store, run, name, width=_WIDTH, mean=True, segment=segment)
            result[_address(f"{root}/series", name=name, **asked, mean=1)] = means
    places = sorted(shown)[:: max(len(shown) // _AXIS_STEPS, 1)]  # positions of steps between them are interpolated
    for axis in details["axes"][1:]:
        found = zip(places, positions(store.checked(run), places, axis, segment).tolist(), strict=True)
        known = [(step, x) for step, x in found if not math.isnan(x)]
        answer = {"steps": [step for step, _ in known], "x": [x for _, x in known]}
        result[_address(f"{root}/axis", name=axis, **asked)] = answer
    steps = details["matrix_steps"]
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), most_steps)).astype(int)).tolist()
    details["matrix_steps"] = [steps[place] for place in chosen]
    details["all_matrix_steps"] = len(steps)
    details["matrices"] = dict(list(details["matrices"].items())[:_MATRICES])
    makers: dict[str, Callable[[], Any]] = {}
    for step in details["matrix_steps"]:
        for name in details["matrices"]:
            address = _address(f"{root}/matrices/{step}/{_quoted(name)}", **asked)
            makers[address] = partial(matrix, store, run, step, name, most=_SIDE, digits=3, segment=segment)
        for name in details["spectra"]:
            layer, _, kind = name.rpartition("/")
            address = _address(f"{root}/spectra/{step}", layer=layer, kind=kind, **asked)
            makers[address] = partial(spectrum, store, run, step, layer or None, kind, segment)
    for address, make in makers.items():
        try:
            result[address] = make()
        except Exception as error:
            result[address] = {"error": store.redact_error(error)}
    return result


def _address(path: str, **query: str | int) -> str:
    """Return an address as the pages write it."""
    return path + "".join(
        f"{'&' if n else '?'}{key}={_quoted(str(value))}" for n, (key, value) in enumerate(query.items())
    )


def _quoted(text: str) -> str:
    """Quote a part of an address like encodeURIComponent."""
    return quote(text, safe="!~*'()-._", errors="replace")
