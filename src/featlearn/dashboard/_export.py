"""The pages as one file, with the data in it: to keep, or to send to somebody."""

from __future__ import annotations

import base64
import hashlib
import json
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
from featlearn.dashboard._matrix_data import matrix
from featlearn.dashboard._run_index import Found, Store
from featlearn.dashboard._spectrum_data import spectrum
from featlearn.errors import InputError
from featlearn.runs.database import DATABASE_FILE

_WIDTH = 400
_SIDE = 64
_STEPS = 12
_MATRICES = 24
_IMPORT = re.compile(r'^import\s+\{[^}]*\}\s+from\s+"\./([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=async function|function|const)", re.MULTILINE)


def export_html(root_or_run: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write the dashboard of a folder, or of one run, as one file that needs no server and no network.

    Curves have at most 400 values, matrices 64 rows and columns at 12 steps, which the pages say.

    Args:
        root_or_run: A folder that holds runs, or the folder of one.
        path: The file, which ends in .html; one that exists is replaced.
    """
    target = Path(path)
    if target.suffix.lower() != ".html":
        raise InputError(f"the dashboard is exported to a file that ends in .html, got {os.fspath(path)!r}")
    store = Store(root_or_run)
    script = plotly_script().read_text(encoding="utf-8")
    held = {"answers": _answers(store), "single": (store.root / DATABASE_FILE).is_file()}
    page = _page(encode_utf8(store.root.name), script, held)
    with file_trouble(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as draft:
            draft.write_text(page, encoding="utf-8")
    return target


def bundle() -> str:
    """The modules of the pages as one script, each after those that it imports.

    Names at the top of a module are unique over all of them, so that what is left without imports is one module.
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


def _page(title: str, plotly: str, held: dict[str, Any]) -> str:
    scripts = [plotly.replace("</script", "<\\/script"), bundle()]
    if "</script" in scripts[1]:
        raise AssertionError("a script of the dashboard would end its own element")
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    data = json.dumps(held, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">\n'
        f'<title>{escape(title)}: featlearn</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n'
        f'</head>\n<body>\n<div id="app"></div>\n<script type="application/json" id="held">{data}</script>\n'
        f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n</body>\n</html>\n'
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _answers(store: Store) -> dict[str, Any]:
    """All that the pages may ask for, by address."""
    found: dict[str, Any] = {"runs": answers.run_list(store)}
    if found["runs"]["ledger"]:
        found["ledger"] = answers.ledger(store)
    for run in store.runs():
        try:
            found |= _answers_of(store, run)
        except Exception as error:  # one run that nobody can read takes no other with it
            found[f"runs/{run.id}"] = store.summary(run) | {"trouble": store.redact_error(error)}
    return {address: to_json(answer) for address, answer in found.items()}


def _answers_of(store: Store, run: Found) -> dict[str, Any]:
    own = f"runs/{run.id}"
    found: dict[str, Any] = {own: answers.details(store, run)}
    told = found[own]
    if told["status"] == "unreadable":
        return found
    found[f"{own}/words"] = answers.phases_over_time(store, run)
    for name in dict.fromkeys([*told["quantities"], *(n for names in told["layers"].values() for n in names)]):
        found[f"{own}/series?name={_quoted(name)}"] = answers.series(store, run, name, width=_WIDTH)
    kept = told["matrix_steps"]
    places = np.unique(np.linspace(0, len(kept) - 1, min(len(kept), _STEPS)).astype(int)).tolist()
    told["matrix_steps"] = [kept[place] for place in places]
    told["all_matrix_steps"] = len(kept)
    told["matrices"] = dict(list(told["matrices"].items())[:_MATRICES])
    for step in told["matrix_steps"]:
        for name in told["matrices"]:
            _hold(store, found, f"{own}/matrices/{step}/{_quoted(name)}", partial(_matrix, store, run, step, name))
        for name in told["spectra"]:
            layer, _, kind = name.rpartition("/")
            address = f"{own}/spectra/{step}?layer={_quoted(layer)}&kind={_quoted(kind)}"
            _hold(store, found, address, partial(spectrum, store, run, step, layer or None, kind))
    return found


def _matrix(store: Store, run: Found, step: int, name: str) -> dict[str, Any]:
    return matrix(store, run, step, name, most=_SIDE, digits=3)


def _hold(store: Store, found: dict[str, Any], address: str, make: Callable[[], Any]) -> None:
    try:
        found[address] = make()
    except Exception as error:
        found[address] = {"error": store.redact_error(error)}


def _quoted(text: str) -> str:
    """As encodeURIComponent writes it."""
    return quote(text, safe="!~*'()-._", errors="replace")
