import io
import tarfile

import numpy as np
import pytest

from featlearn.datasets.uci import uci_names, uci_table, uci_tables
from featlearn.errors import DataNotPresent, InputError


def described(**entries):
    return "".join(f"{key}= {value}\n" for key, value in entries.items()).encode()


def rows(X, y):
    header = "\t" + "\t".join(f"f{j + 1}" for j in range(X.shape[1])) + "\tclase\n"
    lines = (
        f"{i + 1}\t" + "\t".join(f"{v:g}" for v in x) + f"\t{c}\n" for i, (x, c) in enumerate(zip(X, y, strict=True))
    )
    return (header + "".join(lines)).encode()


def lines(*indices):
    return "".join(" ".join(map(str, row)) + " \n" for row in indices).encode()


X = np.array([[0.5, -1.25], [1, 2], [3, 4], [5, 1e-7]])
PLANTS = {
    "plants.txt": described(n_entradas=2, n_clases=3, n_arquivos=1, fich1="plants_R.dat", n_patrons1=4),
    "plants_R.dat": rows(X, [0, 2, 1, 0]),
    "conxuntos.dat": lines([3, 0], [1, 2]),
    "conxuntos_kfold.dat": lines([0, 1, 2], [3], [1, 2, 3], [0], [0, 2, 3], [1], [2, 1, 0], [3]),
}
# Two files: the test file comes first in the archive, and a stray table that the description does not name.
ANTS = {
    "ants_test_R.dat": rows(X + 100, [1, 1, 1, 1]),
    "other_R.dat": rows(X + 200, [1, 1, 1, 1]),
    "ants_train_R.dat": rows(-X, [1, 0, 1, 0]),
    "conxuntos_kfold.dat": PLANTS["conxuntos_kfold.dat"],
    "conxuntos.dat": lines([0, 1], [2, 3]),
    "ants.txt": described(
        n_entradas=2, n_clases=2, n_arquivos=2, fich1="ants_train_R.dat", n_patrons1=4, fich2="ants_test_R.dat"
    ),
}


def archive(folder, index=None, **sets):
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / "uci121_official.tar.xz", "w:xz") as tar:
        readme = tarfile.TarInfo("README")
        tar.addfile(readme)
        for name, files in sets.items():
            directory = tarfile.TarInfo(f"data/{name}")
            directory.type = tarfile.DIRTYPE
            tar.addfile(directory)
            for file, content in files.items():
                member = tarfile.TarInfo(f"data/{name}/{file}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    if index is not None:
        (folder / "index.csv").write_text("name,n_total\n" + "".join(f"{name},4\n" for name in index))
    return folder


def test_a_table_with_its_splits(tmp_path):
    table = uci_table("plants", archive(tmp_path, plants=PLANTS, ants=ANTS))
    np.testing.assert_array_equal(table.X, X)
    assert table.X.dtype == np.float64
    np.testing.assert_array_equal(table.y, [0, 2, 1, 0])
    assert table.y.dtype == np.int64
    assert (table.name, table.classes) == ("plants", 3)
    train, validation = table.tuning
    assert (train.tolist(), validation.tolist()) == ([3, 0], [1, 2])
    assert [(a.tolist(), b.tolist()) for a, b in table.folds] == [
        ([0, 1, 2], [3]),
        ([1, 2, 3], [0]),
        ([0, 2, 3], [1]),
        ([2, 1, 0], [3]),
    ]


def test_of_two_files_the_first_is_taken(tmp_path):
    table = uci_table("ants", archive(tmp_path, ants=ANTS))
    np.testing.assert_array_equal(table.X, -X)
    assert table.y.tolist() == [1, 0, 1, 0]


def test_many_tables_in_one_pass(tmp_path, monkeypatch):
    folder = archive(tmp_path / "uci121", plants=PLANTS, ants=ANTS, bees={**PLANTS, "bees.txt": PLANTS["plants.txt"]})
    assert uci_names(folder) == ["ants", "bees", "plants"]
    assert [t.name for t in uci_tables(folder=folder)] == ["plants", "ants", "bees"]
    opened = []
    original = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda *a, **k: opened.append(a) or original(*a, **k))
    (folder / "index.csv").write_text("name\nplants\nants\nbees\n")
    assert [t.name for t in uci_tables(["bees", "plants"], folder)] == ["plants", "bees"]
    assert len(opened) == 1
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    assert uci_names() == ["ants", "bees", "plants"]
    assert uci_table("ants").name == "ants"


def test_nothing_is_extracted(tmp_path, monkeypatch):
    folder = archive(tmp_path / "in", plants=PLANTS)
    with tarfile.open(folder / "uci121_official.tar.xz", "w:xz") as tar:
        for file, content in PLANTS.items():
            member = tarfile.TarInfo(f"../../plants/{file}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("data/plants/conxuntos.dat")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert uci_table("plants", folder).tuning[0].tolist() == [3, 0]
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["in", "uci121_official.tar.xz", "work"]


def test_unknown_names_are_told_before_anything_is_read(tmp_path):
    folder = archive(tmp_path, index=["plants", "ants"], plants=PLANTS, ants=ANTS)
    with pytest.raises(InputError, match="no table 'plant' among its 2: did you mean 'plants' or 'ants'"):
        uci_tables(["ants", "plant"], folder)
    with pytest.raises(InputError, match=r"no table 'xyz' .*uci_names"):
        uci_table("xyz", folder)
    with pytest.raises(InputError, match=r"\['ants'\]"):
        uci_tables("ants", folder)


def test_a_missing_archive_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    with pytest.raises(
        DataNotPresent, match=r"there is no uci121_official.tar.xz in .*uci121'.*FEATLEARN_DATA"
    ) as caught:
        uci_names()
    assert "\n" not in str(caught.value)
    (tmp_path / "uci121_official.tar.xz").write_bytes(b"no archive at all")
    with pytest.raises(InputError, match="damaged"):
        uci_names(tmp_path)
    whole = archive(tmp_path, plants=PLANTS) / "uci121_official.tar.xz"
    whole.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(InputError, match="damaged"):
        uci_names(tmp_path)
    (tmp_path / "index.csv").write_text("nom\nplants\n")
    with pytest.raises(InputError, match="'name'"):
        uci_names(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conxuntos.dat": None}, "'plants' lacks conxuntos.dat"),
        ({"plants_R.dat": None}, "'plants' lacks plants_R.dat"),
        ({"plants.txt": None}, "'plants' lacks plants.txt"),
        ({"plants.txt": described(fich1="plants_R.dat", n_entradas=2)}, "no entry 'n_patrons1'"),
        ({"plants.txt": PLANTS["plants.txt"].replace(b"n_patrons1= 4", b"n_patrons1= 5")}, "must be 5 rows of 2"),
        ({"plants.txt": PLANTS["plants.txt"].replace(b"n_patrons1= 4", b"n_patrons1= 4.x")}, "'4.x'"),
        ({"plants_R.dat": rows(X, [0, 3, 1, 0])}, "from 0 to 2"),
        ({"plants_R.dat": rows(X, [0, 0.5, 1, 0])}, "from 0 to 2"),
        ({"plants_R.dat": rows(X * np.array([1, np.nan]), [0, 1, 1, 0])}, "missing or infinite"),
        ({"conxuntos.dat": lines([1, 2], [3, 4])}, "exactly once"),  # counted from 1
        ({"conxuntos.dat": lines([0, 1, 2], [2, 3])}, "exactly once"),  # a row on both sides
        ({"conxuntos_kfold.dat": lines([0, 1], [2, 3])}, "must have 8 lines, got 2"),
    ],
)
def test_damaged_tables(tmp_path, change, words):
    files = {file: content for file, content in {**PLANTS, **change}.items() if content is not None}
    folder = archive(tmp_path, index=["plants"], plants=files)
    with pytest.raises(InputError, match=words):
        uci_table("plants", folder)
