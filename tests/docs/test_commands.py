"""Every shell command of README and the guides runs as it is printed.

Commands of featlearn run in one folder per page, in the order of the page, with the files that the page assumes. Those
that install or build (pip, venv, make) are compared with the project's files instead: tests of `make test-slow`
(``test-wheel``) install for real.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from featlearn.runs import Run
from processes import run_code, running

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from make_outputs import run_page as _run_page  # noqa: E402

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
_BASH = re.compile(r"^[ ]*```bash\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)
SELF_CONTAINED = ("README.md", "training.md", "dashboard.md", "command-line.md")
"""Pages whose commands run on nothing but what their blocks have made."""
FEATLEARN = "import sys; from featlearn.cli import app; app()"
CLUSTERS = "docs/guides/clusters.md"
"""Page whose commands start processes and clusters; `make test-slow` runs all of them."""
FAILS = ("featlearn fit friedman.csv --target price", "featlearn predict fit/model.safetensors narrow.csv")
"""Commands that the guide shows with their error."""


def run_page(page: Path, folder: Path) -> None:
    """Run the Python blocks of a page in a folder, and write its scripts there."""
    with torch.random.fork_rng(devices=[]):
        for _ in _run_page(page, folder):
            pass


def commands_of(page: Path) -> list[str]:
    """Return the commands of a page, one string each, continuation lines joined."""
    text = "\n".join(_BASH.findall(page.read_text(encoding="utf-8")))
    return [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]


def prepare(folder: Path, page: Path) -> None:
    """Write the files that a page names: those that its blocks make, and those of the guide that it refers to."""
    guide = ROOT / "docs/guides/command-line.md"
    if page.name in ("README.md", guide.name):
        run_page(guide, folder)
        if page != guide:
            run_script("make.py", folder)
    if page.name in SELF_CONTAINED:
        run_page(page, folder)
        return
    torch.manual_seed(0)
    for name in ("start", "model"):
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
        save_file(net.state_dict(), folder / f"{name}.safetensors")


def run_script(name: str, folder: Path, *arguments: str) -> None:
    """Run a script of a folder, or the code after ``-c``, as ``python`` does."""
    code = arguments[0] if name == "-c" else f"import runpy; runpy.run_path({name!r}, run_name='__main__')"
    done = run_code(f"import sys; sys.path.insert(0, '.'); {code}", cwd=folder)
    assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"


def featlearn_commands() -> list[tuple[str, list[str]]]:
    """Return the commands of each page that are run: those of featlearn, and scripts that the page has written."""
    pages = [(page.relative_to(ROOT).as_posix(), commands_of(page)) for page in PAGES]
    chosen = [(name, [c for c in commands if c.startswith(("featlearn", "python "))]) for name, commands in pages]
    return [(name, commands) for name, commands in chosen if commands and not name.endswith(CLUSTERS)]


@pytest.mark.parametrize(
    ("page", "commands"), featlearn_commands(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands_of_featlearn(page: str, commands: list[str], tmp_path: Path) -> None:
    prepare(tmp_path, ROOT / page)
    for command in commands:
        words = shlex.split(command.replace("--open", ""))
        if words[0] == "python":
            run_script(words[1], tmp_path, *words[2:])
            continue
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
            assert b'"status":"finished"' in answer.read()


def test_other_commands_fit_the_projects_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = 0
    for page in PAGES:
        for command in commands_of(page):
            words = shlex.split(command)
            program = Path(words[0]).name
            if program in ("featlearn", "python", "torchrun", "ray") or "=" in words[0]:
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


@pytest.mark.slow  # starts a cluster, and two processes
def test_the_cluster_page(tmp_path: Path) -> None:
    page = ROOT / CLUSTERS
    run_page(page, tmp_path)
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    ran = []
    try:
        for command in commands_of(page):
            if "192.0.2.1" in command:
                continue  # on another machine
            done = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            ran.append(command.split()[0])
    finally:
        subprocess.run(["ray", "stop", "--force"], env=environment, capture_output=True, check=False)
    assert {"python", "ray", "torchrun", "featlearn"} <= set(ran)
    statuses = [Run.open(path.parent).status for path in (tmp_path / "sweeps").glob("*/trial-*/run.db")]
    assert statuses == ["finished"] * (4 + 4 + 6)
    assert Run.open(tmp_path / "runs" / "sharded").last_step == 20
