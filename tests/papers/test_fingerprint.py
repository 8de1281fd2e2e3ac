"""Points of another version of the source are measured again, or shown as stale."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_reproduce import experiment

import featlearn
from featlearn.papers import fingerprint
from featlearn.papers import runner as module
from featlearn.papers.fingerprint import source_fingerprint, versions
from featlearn.papers.ledger import read_records, write_ledger
from featlearn.papers.registry import all_experiments
from featlearn.papers.runner import reproduce
from featlearn.runs import load_nested, save_nested
from processes import run_code

_CACHED = ("_fingerprint", "_modules", "_tree", "_code", "_needs", "_resolve")

FILES = {
    "__init__.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from pack.features import probe
        def __getattr__(name): ...
    """,
    "errors.py": "class E(Exception): pass",
    "features/__init__.py": """
        from pack.features.probe import probe
        from .other import other as renamed
        HERE = 1
    """,
    "features/probe.py": """
        '''Words.'''
        from pack.features.factored import ratio
        def probe():
            '''More words.'''
            from pack import late  # inside a function
            return ratio()
    """,
    "features/factored.py": "def ratio(): return 1  # a comment",
    "features/other.py": "import pack.tools.deep\ndef other(): pass",
    "late.py": "from . import relative",
    "relative.py": "X = 1",
    "tools/__init__.py": "",
    "tools/deep.py": "D = 1",
    "tools/wide.py": "from pack.errors import *",
    "typed.py": "T = 1",
    "dynamic.py": "import importlib\ndef f(x): return importlib.import_module(f'pack.{x}')",
    "constant.py": "from importlib import import_module\ndef f(): return import_module('pack.relative')",
    "dashboard/__init__.py": "",
    "dashboard/page.py": "P = 1",
    "plots/__init__.py": "from pack.plots.draw import draw",
    "plots/draw.py": "def draw(): pass",
    "papers/__init__.py": "from pack.papers.fig import measure",
    "papers/bare.py": "",
    "papers/fig.py": """
        from typing import TYPE_CHECKING
        import typing as t
        from pack.features import probe
        from pack.plots import draw
        if TYPE_CHECKING:
            from pack.typed import T
        if t.TYPE_CHECKING:
            from pack.tools.wide import E
        def measure(): return probe()
        def conclude(): return draw()
    """,
}


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A package of its own, and the fingerprint of an import line in it after some edits."""
    folder = tmp_path / "pack"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text.replace("\\\n", "\n")))
    monkeypatch.setattr(fingerprint, "_ROOT", "pack")
    monkeypatch.setattr(fingerprint, "_FOLDER", folder)
    hidden = tuple(name.replace("featlearn", "pack") for name in fingerprint._NOT_HASHED)
    monkeypatch.setattr(fingerprint, "_NOT_HASHED", hidden)

    def clear() -> None:
        for name in _CACHED:
            getattr(fingerprint, name).cache_clear()

    def of(module: str = "pack.papers.fig", **edits: str) -> str:
        before = {}
        for name, text in edits.items():
            file = folder / (name.replace("__", "/") + ".py")
            before[file] = file.read_text()
            file.write_text(before[file] + textwrap.dedent(text))
        clear()
        try:
            return fingerprint._fingerprint(module)
        finally:
            for file, text in before.items():
                file.write_text(text)

    yield of
    monkeypatch.undo()
    clear()


def test_the_fingerprint_follows_imports(pack: Callable[..., str]) -> None:
    first = pack()
    assert first == pack()
    used = ("features__factored", "features__probe", "late", "relative")
    for name in used:
        assert pack(**{name: "\nNEW = 1\n"}) != first, name
        assert pack(**{name: "\n# a comment\n'''a text'''\n"}) == first, name
    for name in ("errors", "features__other", "tools__deep", "tools__wide", "typed", "dashboard__page", "plots__draw"):
        assert pack(**{name: "\nNEW = 1\n"}) == first, name
    # What concludes is not what measures: `Experiment.key` knows them apart.
    assert pack(papers__fig="\ndef conclude(): return 2\n") == first
    assert pack(papers__fig="\nfrom pack.errors import E\n") != first


@pytest.mark.parametrize(
    ("line", "needed", "unneeded"),
    [
        ("import pack as p", ["errors", "dynamic", "tools__deep", "late"], []),
        ("import pack.features", ["features__other", "tools__deep", "relative"], ["errors", "typed"]),
        ("from pack import probe", ["features__factored"], ["features__other", "typed"]),
        ("from pack import features", ["features__factored", "features__other", "tools__deep"], ["errors"]),
        ("from pack.features import renamed", ["features__other", "tools__deep"], ["features__factored"]),
        ("from pack.features import HERE", ["features__other", "features__factored"], ["errors"]),
        ("from pack.features import *", ["features__other", "features__factored"], ["errors"]),
        ("from pack.features import unknown", ["features__other", "features__factored"], ["errors"]),
        ("from pack.tools.wide import E", ["tools__wide", "errors"], ["tools__deep"]),
        ("from pack.dynamic import f", ["errors", "typed", "tools__deep"], []),
        ("from pack.constant import f", ["relative"], ["errors", "late"]),
        ("def f():\n    from pack import errors", ["errors"], ["typed"]),
        ("from .. import missing", ["errors", "typed"], []),
    ],
)
def test_ways_to_import(pack: Callable[..., str], line: str, needed: list[str], unneeded: list[str]) -> None:
    added = {"papers__bare": f"\n{line}\n"}
    bare = "pack.papers.bare"
    first = pack(bare, **added)
    for name in needed:
        assert pack(bare, **added, **{name: "\nNEW = 1\n"}) != first, name
    for name in unneeded:
        assert pack(bare, **added, **{name: "\nNEW = 1\n"}) == first, name


def test_fingerprints_of_the_experiments() -> None:
    for name in _CACHED:
        getattr(fingerprint, name).cache_clear()
    began = time.process_time()
    source_fingerprint(all_experiments()["nfa-fig1"].measure)
    assert time.process_time() - began < 2.0  # half a second on a quiet machine
    began = time.process_time()
    every = {name: source_fingerprint(one.measure) for name, one in all_experiments().items()}
    assert len(set(every.values())) > 5
    source_fingerprint(all_experiments()["nfa-fig1"].measure)
    reached, waiting = set(), [all_experiments()["fact-table3"].measure.__module__]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += fingerprint._needs(name)
    assert "featlearn.rfm.feature_updates" in reached
    assert not any(name.startswith(("featlearn.dashboard", "featlearn.cli", "featlearn.reports")) for name in reached)


_MEASURES = """
import functools

def one(x):
    return x + {a}

@functools.cache
def two(x):
    return x + {b}

METHODS = {{"one": one, "more": [two]}}

def measure(seed):
    return {{"value": METHODS["one"](seed) + METHODS["more"][0](seed)}}
"""


def test_the_key_follows_functions_in_containers_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    keys = set()
    for name, (a, b) in {"first": (1, 1), "second": (2, 1), "third": (1, 2)}.items():
        (tmp_path / f"follows_{name}.py").write_text(_MEASURES.format(a=a, b=b))
        keys.add(experiment(measure=importlib.import_module(f"follows_{name}").measure).key({"seed": 0}))
    assert len(keys) == 3


# -- in a folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three points measured with the source "old", and the source is "new"."""
    monkeypatch.setenv("FEATLEARN_TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(module, "find_experiments", lambda names, paper: [experiment()])
    monkeypatch.setattr(module, "source_fingerprint", lambda measure: "old")
    reproduce(folder=tmp_path / "out")
    monkeypatch.setattr(module, "source_fingerprint", lambda measure: "new")
    (tmp_path / "log").unlink()
    return tmp_path / "out"


def points_of(folder: Path) -> list[Path]:
    return sorted((folder / "nfa-test" / "quick" / "points").iterdir())


def test_points_of_another_source_are_measured_again(folder: Path) -> None:
    for file in points_of(folder):  # to tell old numbers from new ones
        state, header = load_nested(file)
        assert header["source"] == "old"
        assert header["versions"] == versions()
        save_nested(file, state | {"values": state["values"] | {"trace": 5.0}}, header)
    (result,) = reproduce(folder=folder)
    assert result.stale == 0
    assert 5.0 not in result.claims[0].measured
    assert (folder.parent / "log").read_text().split() == ["0", "1", "2"]
    assert {load_nested(file)[1]["source"] for file in points_of(folder)} == {"new"}
    (again,) = reproduce(folder=folder)
    assert again.claims == result.claims
    assert (folder.parent / "log").read_text().split() == ["0", "1", "2"]
    assert len(points_of(folder)) == 3


def test_kept_points_make_stale_claims(folder: Path) -> None:
    (result,) = reproduce(folder=folder, keep_stale=True)
    assert result.stale == 3
    assert not (folder.parent / "log").exists()
    assert [claim.verdict for claim in result.claims] == ["stale"]
    assert result.claims[0].measured  # the numbers are there
    index = write_ledger([result], folder)
    assert "1 stale" in index.read_text()
    assert "3 of 3 points are stale" in (folder / "nfa-test.html").read_text()
    assert ",stale," in (folder / "ledger.csv").read_text()
    assert json.loads((folder / "ledger.json").read_text())["experiments"][0]["claims"][0]["verdict"] == "stale"
    (record,) = read_records(folder / "ledger.json")
    assert record.claims[0].verdict == "stale"
    assert record.source == ""
    (fresh,) = reproduce(folder=folder)  # and measured again when they are not kept
    assert fresh.claims[0].verdict == "reproduced"
    assert "stale" not in write_ledger([fresh], folder).read_text()


def test_one_stale_point_is_enough_and_old_folders_have_no_fingerprint(folder: Path) -> None:
    reproduce(folder=folder)
    file = points_of(folder)[0]
    save_nested(file, load_nested(file)[0])  # as earlier versions wrote them
    (result,) = reproduce(folder=folder, keep_stale=True)
    assert result.stale == 1
    assert result.claims[0].verdict == "stale"
    (result,) = reproduce(folder=folder)
    assert result.stale == 0
    assert len((folder.parent / "log").read_text().split()) == 4


def test_a_kill_while_measuring_again_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def report(name: str, done: int, points: int) -> None:
        calls.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(folder=folder, progress=report)
    assert len(points_of(folder)) == 3  # none is lost, not even the old one
    assert (folder.parent / "log").read_text().split() == ["0", "1"]
    (result,) = reproduce(folder=folder)
    assert (folder.parent / "log").read_text().split() == ["0", "1", "2"]
    assert result.stale == 0


def test_experiments_of_an_older_call_are_stale_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from featlearn.papers import ledger as records

    done = module.Reproduction(
        experiment(name="nfa-fig1"), "quick", {}, experiment().run(experiment().config("quick")), 1.0, (3, 3)
    )
    other = module.Reproduction(
        experiment(name="nfa-fig4"), "quick", {}, experiment().run(experiment().config("quick")), 1.0, (3, 3)
    )
    monkeypatch.setattr(records, "source_fingerprint", lambda measure: "old")
    write_ledger([done], tmp_path)
    write_ledger([other], tmp_path)
    verdicts = lambda: [r.claims[0].verdict for r in read_records(tmp_path / "ledger.json")]  # noqa: E731
    assert verdicts() == ["reproduced", "reproduced"]
    monkeypatch.setattr(records, "source_fingerprint", lambda measure: "new")
    write_ledger([other], tmp_path)
    assert verdicts() == ["stale", "reproduced"]
    monkeypatch.setattr(records, "source_fingerprint", lambda measure: "old")
    write_ledger([other], tmp_path)
    assert verdicts() == ["reproduced", "reproduced"]  # the source of its measurements is back
    text = json.loads((tmp_path / "ledger.json").read_text())
    for one in text["experiments"]:  # a ledger of the first format
        del one["source"]
        for claim in one["claims"]:
            del claim["stale"]
    (tmp_path / "ledger.json").write_text(json.dumps(text | {"schema_version": 1}))
    write_ledger([other], tmp_path)
    assert verdicts() == ["stale", "reproduced"]


def test_versions_are_those_in_use() -> None:
    result = versions()
    assert result["torch"] == torch.__version__
    assert result["numpy"] == np.__version__
    assert result["python"] == ".".join(map(str, sys.version_info[:3]))


# -- the library itself ------------------------------------------------------------------------------------------------

_SCRIPT = """
import json, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "featlearn"]:
    del sys.modules[name]  # the process was forked from one that has imported the library under test
sys.path.insert(0, sys.argv.pop(1))
import featlearn
from featlearn.papers.runner import reproduce
(found,) = reproduce(["nfa-fig1"], "smoke", folder=sys.argv[1], keep_stale=len(sys.argv) > 2)
print(json.dumps([featlearn.__file__, found.stale, [[c.mean, c.verdict] for c in found.claims]]))
"""


def test_an_edited_library_is_measured_again(tmp_path: Path) -> None:
    """`ratio` made to return .123 changed nothing in a folder of an older version."""
    package = tmp_path / "src" / "featlearn"
    shutil.copytree(Path(featlearn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    store = tmp_path / "out" / "nfa-fig1" / "smoke" / "points"

    def run(*options: str) -> tuple[list[Any], set[int]]:
        done = run_code(_SCRIPT, tmp_path / "src", tmp_path / "out", *options)
        assert done.returncode == 0, done.stderr
        file, stale, claims = json.loads(done.stdout)
        assert Path(file).is_relative_to(tmp_path)
        return [stale, claims], {path.stat().st_mtime_ns for path in store.iterdir()}

    def edit(name: str, before: str, after: str) -> None:
        text = (package / name).read_text()
        assert before in text
        (package / name).write_text(text.replace(before, after))

    first, times = run()
    edit(
        "features/_correlations.py",
        '"""Return the quotient; NaN if the denominator is zero."""',
        '"""Words."""  # note',
    )
    with (package / "dashboard" / "_api.py").open("a") as file:
        file.write("\nNEW = 1\n")
    second, same = run()
    assert (second, same) == (first, times)
    quotient = "return numerator / denominator if denominator != 0 else math.nan"
    edit("features/_correlations.py", quotient, "return 0.123")
    kept, same = run("keep")
    assert same == times
    assert kept[0] > 0
    assert {verdict for _, verdict in kept[1]} == {"stale"}
    assert [mean for mean, _ in kept[1]] == [mean for mean, _ in first[1]]
    fresh, changed = run()
    assert not changed & times
    assert fresh[0] == 0
    assert fresh[1][0][0] == pytest.approx(0.123)
    assert first[1][0][0] > 0.5
