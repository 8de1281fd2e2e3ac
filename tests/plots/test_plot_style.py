import os
import subprocess
import sys

import matplotlib as mpl
import pytest
from matplotlib import image

from featlearn.errors import InputError
from featlearn.plots import layer_bars, new_figure, save_figure, style


def figure():
    return layer_bars(["a", "b"], {"NFC": [0.5, 0.9], "centered": [0.1, float("nan")]}, title="Two layers")


def test_style_is_local():
    before = dict(mpl.rcParams)
    with style():
        assert mpl.rcParams["axes.spines.top"] is False
    figure()
    assert dict(mpl.rcParams) == before

    def fail():
        with style():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert dict(mpl.rcParams) == before


def test_figures_need_no_pyplot_and_no_backend(tmp_path):
    code = (
        "import sys; from featlearn.plots import spectrum, save_figure\n"
        "save_figure(spectrum({'a': [1.0, 2.0]}), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    target = tmp_path / "a.png"
    subprocess.run([sys.executable, "-c", code, str(target)], check=True, env=_environment())
    assert target.exists()


def _environment():
    # A backend that cannot be loaded shows that none is asked for; the path finds this very package.
    return {**os.environ, "MPLBACKEND": "tkagg", "DISPLAY": "", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    ("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_saved_whole_and_the_same_every_time(tmp_path, kind, magic):
    path = tmp_path / "new" / f"figure.{kind}"
    assert save_figure(figure(), path) == path
    first = path.read_bytes()
    assert first.startswith(magic)
    save_figure(figure(), str(path))
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")
    fig = figure()

    def broken(name, **settings):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(fig, "savefig", broken)
    with pytest.raises(OSError, match="disk full"):
        save_figure(fig, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_resolution(tmp_path):
    pixels = image.imread(save_figure(new_figure(4.0, 2.0), tmp_path / "a.png"))
    assert pixels.shape[:2] == (300, 600)


def test_unknown_kind(tmp_path):
    with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
        save_figure(figure(), tmp_path / "figure.gif")
