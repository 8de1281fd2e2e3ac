"""Every shell command of README and the guides runs as it is printed.

Commands of featlearn run in one folder per page, in the order of the page, with the files that the page assumes. Those
that install or build (pip, venv, make) are compared with the project's files instead: tests of `make test-slow`
(``test-wheel``) install for real.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from featlearn.runs import Run
from processes import run_code, running

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
_BASH = re.compile(r"^[ ]*```bash\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
MODEL = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
"""
FEATLEARN = "import sys; from featlearn.cli import app; app()"
FAILS = ("featlearn fit friedman.csv --target price", "featlearn predict fit/model.safetensors narrow.csv")
"""Commands that the guide shows with their error."""


def commands_of(page: Path) -> list[str]:
    """Return the commands of a page, one string each, continuation lines joined."""
    text = "\n".join(_BASH.findall(page.read_text(encoding="utf-8")))
    return [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]


def prepare(folder: Path) -> None:
    """Write the files that the pages name."""
    (folder / "model.py").write_text(MODEL)
    torch.manual_seed(0)
    for name in ("start", "end", "model"):
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
        save_file(net.state_dict(), folder / f"{name}.safetensors")
    torch.save(net.state_dict(), folder / "start.pt")
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(rng.random((60, 10))).add_prefix("x")
    rows.assign(y=rows.x0 * rows.x1).to_csv(folder / "friedman.csv", index=False)
    rows.assign(price=rows.x0 + rows.x1).to_csv(folder / "houses.csv", index=False)
    rows.head(3).to_csv(folder / "new.csv", index=False)
    rows.drop(columns=["x8", "x9"]).to_csv(folder / "narrow.csv", index=False)
    with Run.create(folder / "runs" / "first", {"lr": 0.1}) as run:
        run.log(0, {"loss": 1.0})
    with Run.create(folder / "nfa" / "run", {"update": "nfa"}) as run:
        run.log(0, {"error": 1.0})


def featlearn_commands() -> list[tuple[str, list[str]]]:
    pages = [(page.relative_to(ROOT).as_posix(), commands_of(page)) for page in PAGES]
    return [(name, [c for c in commands if c.startswith("featlearn")]) for name, commands in pages if commands]


@pytest.mark.parametrize(
    ("page", "commands"), featlearn_commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands_of_featlearn(page: str, commands: list[str], tmp_path: Path) -> None:
    prepare(tmp_path)
    for command in commands:
        words = shlex.split(command.replace("--open", ""))
        if words[1] == "demo":
            continue  # half a minute; `test_the_demo_runs` runs it
        if words[1] == "dashboard" and "--export" not in words:
            check_dashboard(words[2:], tmp_path)
            continue
        done = run_code(FEATLEARN, *words[1:], cwd=tmp_path, env={"BROWSER": "true"})
        assert done.returncode == (1 if command in FAILS else 0), f"{page}: {command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_demo_runs(tmp_path: Path) -> None:
    commands = {c for _, all_of_page in featlearn_commands() for c in all_of_page if c.startswith("featlearn demo")}
    assert len(commands) >= 2
    for command in sorted(commands):
        done = run_code(FEATLEARN, *shlex.split(command)[1:], cwd=tmp_path, env={"BROWSER": "true"})
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "demo" / "index.html").is_file()


def check_dashboard(words: list[str], folder: Path) -> None:
    """Start the server, ask for its runs, and stop it."""
    token = "a-long-word-for-the-test"
    if "--host" in words:
        words = [*words[: words.index("--host")], "--host", "127.0.0.1", "--token", token]
    with running(FEATLEARN, "dashboard", *words, "--port", "0", cwd=folder) as (child, files):
        address = None
        for _ in range(300):
            output = "".join(file.read_text() for file in (files / "stdout", files / "stderr") if file.exists())
            address = re.search(r"http://127\.0\.0\.1:\d+", output)
            if address or not child.is_alive():
                break
            time.sleep(0.1)
        assert address is not None, output
        request = urllib.request.Request(f"{address[0]}/api/runs", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert b"first" in answer.read()


def test_other_commands_fit_the_projects_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = 0
    for page in PAGES:
        for command in commands_of(page):
            words = shlex.split(command)
            program = Path(words[0]).name
            if program == "featlearn" or (program == "python" and "load_tabular" in command) or program == "torchrun":
                continue  # run by the other tests
            known += 1
            if program == "pip":
                assert words[1] == "install", command
                wanted = words[-1].removeprefix("featlearn").removeprefix(".").strip("[]")
                assert not wanted or wanted in project["optional-dependencies"], command
                assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).is_file(), command
            elif program == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), command
            else:
                assert words[:3] == ["python3", "-m", "venv"], command
    assert known >= 4


def test_the_saved_model_is_read_in_python(tmp_path: Path) -> None:
    prepare(tmp_path)
    (command,) = [c for c in commands_of(ROOT / "docs/guides/command-line.md") if c.startswith("python -c")]
    made = run_code(FEATLEARN, "fit", "friedman.csv", "--target", "y", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    done = run_code(shlex.split(command)[2], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_script_of_several_processes(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/large-models.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(# file: shards\.py\n.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert script is not None
    (tmp_path / "shards.py").write_text(script[1], encoding="utf-8")
    (command,) = [c for c in commands_of(ROOT / "docs/guides/large-models.md") if c.startswith("torchrun")]
    words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == script[2].split()
