from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dashboard_runs import EVIL, FEATURES, OLD_LEDGER, folder_of_runs, log_step, trained_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featlearn.errors import InputError
from featlearn.papers.ledger import write_ledger
from featlearn.papers.runner import reproduce
from featlearn.runs import Run
from processes import running

pytest.importorskip("starlette")
pytest.importorskip("plotly")
from starlette.testclient import TestClient

from featlearn._utils.json import encode_json
from featlearn.dashboard import create_app, serve
from featlearn.dashboard._matrix_data import rounded, shrunk
from featlearn.dashboard._security import is_loopback

SECRET = "the content of a file that is not a run"
TOKEN = "a-token-of-more-than-16-letters"


def client_of(root: Path, **options: Any) -> TestClient:
    return TestClient(create_app(root, **options), base_url="http://127.0.0.1:8050", follow_redirects=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    above = tmp_path_factory.mktemp("above")
    (above / "secret.txt").write_text(SECRET)
    (above / "runs").mkdir()
    return folder_of_runs(above / "runs")


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    with client_of(root) as result:
        yield result


@pytest.fixture(scope="module")
def ids(client: TestClient) -> dict[str, str]:
    return {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}


def strictly(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are none."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


# -- answers -----------------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_their_trouble(client: TestClient) -> None:
    result = strictly(client.get("/api/runs").text)
    assert [run["name"] for run in result["runs"]] == ["wine", "second", "first", "damaged"]
    wine, second, _, damaged = result["runs"]
    assert (wine["kind"], second["last_step"], second["status"]) == ("rfm", 11, "finished")
    assert second["loss"] == {"name": "loss", "value": pytest.approx(1 / 12)}
    assert second["readings"] == {"learning": 2}
    assert second["metrics"] == {"loss": [pytest.approx(1 / 12), pytest.approx(1 / 12), 1.0], "strange": [None] * 3}
    assert (result["complete"], result["loading"]) == (True, 0)
    assert second["settings"] == {"lr": 0.2, "net.width": 8, "odd": None}
    assert damaged["status"] == "unreadable"
    assert "not a database" in damaged["message"]
    assert result["ledger"] is True


def test_no_answer_tells_where_the_folder_is(client: TestClient, root: Path, ids: dict[str, str]) -> None:
    for path in (
        "runs",
        f"runs/{ids['damaged']}",
        f"runs/{ids['first']}/matrices/1/x",
        f"runs/{ids['first']}",
        "ledger",
    ):
        assert str(root.parent) not in client.get(f"/api/{path}").text


def test_a_run_says_what_can_be_asked_of_it(client: TestClient, ids: dict[str, str]) -> None:
    run = strictly(client.get(f"/api/runs/{ids['first']}").text)
    assert run["quantities"] == ["loss", "strange"]
    assert run["layers"]["net.1"] == ["fact", "nfc", "w.alpha", "w.edge", "w.spikes"]
    assert run["matrix_steps"] == [0, 3, 6, 9]
    assert run["matrices"] == {f"{EVIL}/agop": [20, 20], "net.1/agop": [20, 20]}
    assert run["spectra"] == [f"{EVIL}/w", "net.1/w"]
    assert run["environment"]["torch"] == str(torch.__version__)
    assert strictly(client.get(f"/api/runs/{ids['wine']}").text)["features"] == FEATURES


def test_series_of_all_layers_of_one_and_of_the_run(client: TestClient, ids: dict[str, str]) -> None:
    address = f"/api/runs/{ids['first']}/series"
    every = strictly(client.get(address, params={"name": "nfc"}).text)["curves"]
    assert [curve["layer"] for curve in every] == [EVIL, "net.1"]
    assert every[0]["steps"] == list(range(12))
    assert every[0]["values"] == pytest.approx([step / 20 for step in range(12)])
    one = strictly(client.get(address, params={"name": "nfc", "layer": "net.1", "from": 3, "to": 5}).text)["curves"]
    assert (len(one), one[0]["steps"], one[0]["reduced"]) == (1, [3, 4, 5], False)
    strange = strictly(client.get(address, params={"name": "strange", "layer": ""}).text)["curves"]
    assert strange[0]["values"] == [None] * 12
    assert client.get(address, params={"name": "beauty"}).status_code == 404


def test_a_long_series_keeps_its_peaks(tmp_path: Path) -> None:
    with Run.create(tmp_path / "long") as run, run._database.transaction() as connection:
        rows = [(step, "", "loss", 100.0 if step == 5001 else math.sin(step)) for step in range(10_000)]
        connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    with client_of(tmp_path) as client:
        name = client.get("/api/runs").json()["runs"][0]["id"]
        address = f"/api/runs/{name}/series?name=loss"
        for extra in ("", "&log=1"):
            [curve] = client.get(f"{address}&width=200{extra}").json()["curves"]
            assert len(curve["steps"]) <= 202
            assert (curve["total"], curve["reduced"], max(curve["values"])) == (10_000, True, 100.0)
            assert curve["steps"] == sorted(curve["steps"])
            assert min(curve["values"]) == pytest.approx(-1, abs=1e-3)
        [close] = client.get(f"{address}&width=200&from=4990&to=5010").json()["curves"]
        assert close["steps"] == list(range(4990, 5011))


def test_matrices_are_shrunk_by_block_means(tmp_path: Path) -> None:
    whole = torch.arange(600 * 500, dtype=torch.float64).reshape(600, 500)
    with Run.create(tmp_path / "run") as run:
        run.save_matrices(7, {"a/b": whole, "grouped": torch.ones(2, 3, 3), "gone": torch.full((2, 2), math.nan)})
    with client_of(tmp_path) as client:
        address = f"/api/runs/{client.get('/api/runs').json()['runs'][0]['id']}/matrices/7"
        result = strictly(client.get(f"{address}/a%2Fb").text)
        assert (result["shape"], result["block"], result["reduced"]) == ([600, 500], [3, 2], True)
        assert len(result["values"]) == 200
        assert result["values"][1][2] == pytest.approx(float(whole[3:6, 4:6].mean()), rel=1e-3)
        assert strictly(client.get(f"{address}/grouped?group=1").text)["groups"] == 2
        assert client.get(f"{address}/grouped?group=2").status_code == 400
        assert strictly(client.get(f"{address}/gone").text)["values"] == [[None, None], [None, None]]
        assert client.get(f"{address}/none").status_code == 404
        assert client.get(f"{address.removesuffix('7')}8/a/b").status_code == 404


def test_a_spectrum_beside_its_start(client: TestClient, ids: dict[str, str]) -> None:
    address = f"/api/runs/{ids['first']}/spectra/9"
    assert strictly(client.get(address).text)["spectra"][1] == {"layer": "net.1", "kind": "w", "size": 60}
    result = strictly(client.get(address, params={"layer": "net.1", "kind": "w"}).text)
    assert (result["initial_step"], result["phase"], result["alpha"], result["edge"]) == (0, "bulk + spikes", 2.5, 3.0)
    assert len(result["spikes"]) == 1
    assert result["spikes"][0] == pytest.approx(result["top"], rel=1e-3)
    assert "left the bulk" in result["meaning"]
    assert result["initial_edge"] < result["top"]
    assert sum(result["histogram"]["initial"]) == pytest.approx(1, abs=1e-2)
    assert client.get(address, params={"kind": "ntk"}).status_code == 404


def test_words_come_as_stretches(client: TestClient, ids: dict[str, str]) -> None:
    words = strictly(client.get(f"/api/runs/{ids['first']}/words").text)["words"]
    phases = next(line for line in words if line["layer"] == "net.1" and line["name"] == "w.phase")
    assert phases["stretches"] == [[0, 3, "invariant bulk"], [4, 11, "bulk + spikes"]]


def test_runs_are_compared(client: TestClient, ids: dict[str, str]) -> None:
    names = ",".join(ids[name] for name in ("first", "second", "damaged"))
    result = strictly(client.get("/api/compare", params={"ids": names, "name": "nfc", "layer": "net.1"}).text)
    assert [curve["id"] for curve in result["curves"]] == [ids["first"], ids["second"]]
    result = strictly(client.get("/api/compare", params={"ids": names}).text)
    assert result["settings"] == [{"setting": "lr", "values": {ids["first"]: 0.1, ids["second"]: 0.2}}]
    assert result["curves"] == []
    assert client.get("/api/compare").status_code == 400
    assert client.get("/api/compare?ids=000000000000").status_code == 404


def test_an_old_ledger_and_one_that_was_just_written(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ledger.json").write_text(OLD_LEDGER)
    (done,) = reproduce(["adaptive-fig2"], "smoke", folder=tmp_path / "points")
    write_ledger([done], tmp_path / "new")
    with client_of(tmp_path) as client:
        answer = strictly(client.get("/api/ledger").text)
    assert answer["troubles"] == []
    old = [claim for claim in answer["claims"] if claim["experiment"] == "nfa-fig1"]
    assert [(claim["published"], claim["measured"]) for claim in old] == [("0.93", "0.92"), ("0.53", "0.9")]
    new = [claim for claim in answer["claims"] if claim["experiment"] == "adaptive-fig2"]
    assert [(c["text"], c["published"], c["measured"], c["verdict"], c["tolerance"]) for c in new] == [
        (c.text, c.published_text, c.measured_text, c.verdict, c.tolerance) for c in done.claims
    ]
    assert {claim["paper"] for claim in new} == {"Adaptive tangent features"}


def test_the_ledger_and_a_damaged_one(client: TestClient, tmp_path: Path) -> None:
    claims = strictly(client.get("/api/ledger").text)["claims"]
    assert [claim["verdict"] for claim in claims] == ["reproduced", "differs"]
    assert claims[0]["paper"].startswith("Feature learning as alignment")
    for place, text in enumerate(
        ("{", "[]", '{"schema_version": 1, "experiments": [{"claims": [{"measured": "x"}]}]}')
    ):
        (tmp_path / str(place)).mkdir()
        (tmp_path / str(place) / "ledger.json").write_text(text)
    with client_of(tmp_path) as other:
        result = other.get("/api/ledger")
        assert (result.status_code, len(result.json()["troubles"])) == (200, 3)


def test_a_run_that_is_written_meanwhile(tmp_path: Path) -> None:
    run = trained_run(tmp_path, steps=2)
    with client_of(tmp_path) as client:
        name = client.get("/api/runs").json()["runs"][0]["id"]
        before = client.get(f"/api/runs/{name}").json()
        assert before["status"] == "running"
        same = client.get(f"/api/runs/{name}/changes?after={before['version']}").json()
        assert same == {"version": before["version"], "changed": False}
        log_step(run, 2)
        now = client.get(f"/api/runs/{name}/changes?after={before['version']}").json()
        assert (now["changed"], now["last_step"], now["status"]) == (True, 2, "running")
        assert client.get(f"/api/runs/{name}/series?name=loss").json()["curves"][0]["steps"] == [0, 1, 2]
        run.finish()
        end = client.get(f"/api/runs/{name}/changes?after={now['version']}").json()
        assert (end["changed"], end["status"]) == (True, "finished")


def test_old_and_damaged_databases_are_no_error(tmp_path: Path) -> None:
    trained_run(tmp_path, "odd").finish()
    with sqlite3.connect(tmp_path / "odd" / "run.db") as connection:
        connection.execute("UPDATE metrics SET value = x'00ff' WHERE name = 'loss' AND step = 11")
        connection.execute("UPDATE meta SET value = '[1' WHERE key = 'environment'")
    connection.close()
    shutil.copytree(tmp_path / "odd", tmp_path / "short")
    content = (tmp_path / "short" / "run.db").read_bytes()
    (tmp_path / "short" / "run.db").write_bytes(content[:6000])
    (tmp_path / "short" / "matrices" / "9.safetensors").write_bytes(b"\x05")
    with client_of(tmp_path) as client:
        for run in client.get("/api/runs").json()["runs"]:
            assert run["status"] == "unreadable"
            for what in ("", "/series?name=loss", "/words", "/spectra/9?kind=w", "/matrices/9/net.1/agop", "/changes"):
                answer = client.get(f"/api/runs/{run['id']}{what}")
                assert answer.status_code in (200, 400, 404), (what, answer.text)


# -- who may ask, and for what -----------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_asked_no_error_of_the_server_and_nothing_from_outside(
    client: TestClient, ids: dict[str, str], data: st.DataObject
) -> None:
    odd = st.one_of(
        st.text(max_size=30),
        st.sampled_from(
            ["..", "../secret.txt", "%2e%2e", "../../secret.txt", "/etc/passwd", "run.db", "\0", "9" * 40, "-1"]
        ),
        st.sampled_from([*ids.values(), "nfc", "loss", "net.1", "net.1/agop", "3", "w"]),
    )
    shapes = ["/{}", "/api/{}", "/api/runs/{}", "/api/runs/{}/{}", "/api/runs/{}/matrices/{}/{}", "/static/{}",
              "/api/runs/{}/spectra/{}", "/api/runs/{}/series", "/api/runs/{}/findings", "/api/values",
              "/api/compare"]  # fmt: skip
    shape = data.draw(st.sampled_from(shapes))
    path = shape.format(*(data.draw(odd) for _ in range(shape.count("{}"))))
    names = "name layer layers width from to kind ids after group log most mean axis segment x"
    keys = st.sampled_from(names.split())
    query = data.draw(st.dictionaries(keys, odd, max_size=4))
    try:
        path.encode()
        json.dumps(query).encode()
        answer = client.get("http://127.0.0.1" + "/" + "/".join(map(_quote, path.lstrip("/").split("/"))), params=query)
    except UnicodeEncodeError:
        return
    assert answer.status_code in (200, 304, 307, 400, 404), answer.text
    assert SECRET not in answer.text
    assert "root:" not in answer.text
    if path.startswith("/api/") or answer.status_code >= 400:
        assert answer.status_code == 200 or "error" in strictly(answer.text)


def _quote(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="%")


def test_links_are_refused(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    trained_run(outside, "run").finish()
    inside.mkdir()
    (inside / "linked").symlink_to(outside / "run", target_is_directory=True)
    (inside / "half").mkdir()
    (inside / "half" / "run.db").symlink_to(outside / "run" / "run.db")
    shutil.copytree(outside / "run", inside / "matrices-linked")
    shutil.rmtree(inside / "matrices-linked" / "matrices")
    (inside / "matrices-linked" / "matrices").symlink_to(outside / "run" / "matrices")
    shutil.copytree(outside / "run", inside / "file-linked")
    file = inside / "file-linked" / "matrices" / "9.safetensors"
    file.unlink()
    file.symlink_to(outside / "run" / "matrices" / "9.safetensors")
    (outside / "ledger.json").write_text("{}")
    (inside / "ledger.json").symlink_to(outside / "ledger.json")
    with client_of(inside) as client:
        listed = client.get("/api/runs").json()
        runs = {run["path"]: run for run in listed["runs"]}
        assert set(runs) == {"half", "matrices-linked", "file-linked"}
        assert listed["ledger"] is False
        assert (runs["half"]["status"], "symbolic link" in runs["half"]["message"]) == ("unreadable", True)
        assert client.get(f"/api/runs/{runs['half']['id']}/series?name=loss").status_code == 400
        for name in ("matrices-linked", "file-linked"):
            answer = client.get(f"/api/runs/{runs[name]['id']}/matrices/9/net.1/agop")
            assert (answer.status_code, "symbolic link" in answer.json()["error"]) == (400, True)
            assert "symbolic link" in client.get(f"/api/runs/{runs[name]['id']}").json()["trouble"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading(client: TestClient, method: str) -> None:
    answer = client.request(method, "/api/runs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_only_by_our_own_names(client: TestClient, root: Path) -> None:
    for host in ("127.0.0.1:8050", "localhost:1", "LOCALHOST", "[::1]:8050"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8050", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "[::2]"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 400
    with client_of(root, hosts=["box"]) as other:
        assert other.get("/", headers={"host": "box:8050"}).status_code == 200
        assert other.get("/").status_code == 400


def test_a_token_once_then_a_cookie(root: Path) -> None:
    with client_of(root, token=TOKEN) as client:
        for path in ("/", "/api/runs", "/static/main.js", "/plotly.min.js", "/?token=wrong"):
            assert client.get(path).status_code == 401
        assert client.get("/api/runs", headers={"authorization": "Bearer no"}).status_code == 401
        assert client.get("/api/runs", headers={"cookie": "featlearn_token=no"}).status_code == 401
        assert client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        welcome = client.get(f"/api/runs/x/series?name=a&token={TOKEN}")
        assert (welcome.status_code, welcome.headers["location"]) == (303, "/api/runs/x/series?name=a")
        cookie = welcome.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        assert client.get("/api/runs").status_code == 200
        assert client.get(f"http://127.0.0.1//evil.example/?token={TOKEN}").headers["location"] == "/evil.example/"


def test_what_a_browser_may_do(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/nowhere", "/static/main.js"):
        headers = client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
    assert client.head("/api/runs").status_code == 200


def test_other_machines_need_a_token(root: Path) -> None:
    with pytest.raises(InputError, match="requires a token"):
        serve(root, host="0.0.0.0")
    with pytest.raises(InputError, match="at least 16"):
        serve(root, host="0.0.0.0", token="short")
    with pytest.raises(InputError, match="port must be"):
        serve(root, port=70_000)
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.evil.example", "10.0.0.1")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_server_says_where_it_is_and_stops_when_asked(root: Path) -> None:
    code = f"from featlearn.dashboard import serve\nserve({str(root)!r}, port=0, ready=lambda a: print(a, flush=True))"
    with running(code) as (process, files):
        end = time.monotonic() + 60
        while not (text := (files / "stdout").read_text() if (files / "stdout").exists() else "").endswith("\n"):
            assert process.is_alive(), (files / "stderr").read_text()
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.02)
        with urllib.request.urlopen(f"{text.strip()}api/runs", timeout=20) as answer:
            assert len(json.load(answer)["runs"]) == 4
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 0


def test_a_port_that_is_taken(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="Choose another port"):
        serve(root, port=taken.getsockname()[1])


def test_missing_packages_and_folders_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="root must be an existing folder"):
        create_app(tmp_path / "none")
    monkeypatch.setattr("featlearn.dashboard._app.find_spec", lambda name: None)
    for call in (lambda: create_app(tmp_path), lambda: serve(tmp_path)):
        with pytest.raises(InputError, match=r"pip install 'featlearn\[dashboard\]'"):
            call()


# -- small parts -------------------------------------------------------------------------------------------------------


def nests(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5), nests))
def test_everything_becomes_json(value: Any) -> None:
    strictly(encode_json(value).decode())


def test_rounding_and_shrinking() -> None:
    values = torch.tensor([0.0, -1.23456789e-200, 9.99999e20, math.inf, 123456.789], dtype=torch.float64).numpy()
    assert rounded(values, 3).tolist() == pytest.approx([0.0, -1.23e-200, 1e21, math.inf, 123000.0], rel=1e-12, abs=0)
    matrix = torch.rand(7, 5).double().numpy()
    assert shrunk(matrix, 7) is matrix
    assert shrunk(matrix, 4).shape == (4, 3)
    assert shrunk(matrix, 4)[3, 2] == matrix[6, 4]


def test_the_root_may_be_a_run_or_be_reached_by_a_link(tmp_path: Path) -> None:
    trained_run(tmp_path, "run").finish()
    (tmp_path / "alias").symlink_to(tmp_path / "run")
    for root in (tmp_path / "run", tmp_path / "alias"):
        with client_of(root) as client:
            [run] = client.get("/api/runs").json()["runs"]
            assert (run["path"], run["status"]) == (".", "finished")
    assert os.listdir(tmp_path / "run" / "matrices")
