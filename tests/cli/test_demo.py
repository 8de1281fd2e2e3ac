"""The command, as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import featlearn as fl


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from featlearn.cli import app; app()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_demo_prints_the_table_and_writes_pictures_and_a_report(tmp_path: Path) -> None:
    done = run("demo", "--out", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    assert "NFC before" in done.stdout
    assert "128 x 32" in done.stdout
    assert done.stderr == ""  # the progress bar shows on terminals only
    for name in ("features.png", "layers.png", "spectrum.png", "wine.png"):
        assert (tmp_path / "demo" / name).read_bytes().startswith(b"\x89PNG")
    report = fl.Report.load(tmp_path / "demo" / "report")
    assert f"{report['0'].nfc:.3f}" in done.stdout
    assert "It looks at proline, flavanoids and alcohol most" in done.stdout
    assert "The weights' spectrum is bulk + spikes: 1 new eigenvalue" in done.stdout


def test_demo_says_why_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("demo", "--out", str(tmp_path / "file"))
    assert done.returncode != 0
    assert done.stderr.startswith("featlearn: ")
    assert "Traceback" not in done.stderr
