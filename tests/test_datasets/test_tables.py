import gzip
import sys

import numpy as np
import pandas as pd
import pytest

from featlearn.datasets._base import data_folder
from featlearn.datasets.tables import parts_of, read_table
from featlearn.errors import InputError

CSV = "age,color,price\n3,red,1.5\n,blue,2\n5,,3\n"


@pytest.mark.parametrize("ending", [".csv", ".CSV", ".csv.gz", ".tsv", ".tsv.gz"])
def test_text_tables(tmp_path, ending):
    text = CSV.replace(",", "\t") if "tsv" in ending else CSV
    path = tmp_path / f"cars{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    frame = read_table(path)
    assert list(frame.columns) == ["age", "color", "price"]
    assert frame["age"].isna().tolist() == [False, True, False]
    rest, target = read_table(str(path), target="price")
    assert list(rest.columns) == ["age", "color"]
    assert target.tolist() == [1.5, 2, 3]
    assert target.name == "price"


@pytest.mark.parametrize("index", [None, ["place"], ["place", "year"], [None, "year"]])
def test_the_index_of_a_parquet_file(index, tmp_path) -> None:
    """A level with a name is a column, whether the file is read as a whole or in parts; one without a name is not."""
    frame = pd.DataFrame({"a": np.arange(6.0), "y": np.arange(6.0)})
    if index is not None:
        levels = [np.arange(6) + 100.0, np.arange(6) + 2000.0][: len(index)]
        frame.index = (
            pd.MultiIndex.from_arrays(levels, names=index) if len(index) > 1 else pd.Index(levels[0], name="place")
        )
    frame.to_parquet(tmp_path / "t.parquet")
    named = {name for name in index or () if name}
    whole = read_table(tmp_path / "t.parquet")
    parts = pd.concat(list(parts_of(tmp_path / "t.parquet", rows=4)), ignore_index=True)
    for table in (whole, parts):
        assert set(table.columns) == {"a", "y", *named}
        for name in named:
            assert table[name].tolist() == frame.index.get_level_values(name).tolist()


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "cars.parquet"
    cars = pd.DataFrame({"age": [3.0, None], "color": pd.Categorical(["red", "blue"]), "price": [1, 2]})
    cars.to_parquet(path, engine="pyarrow")
    rest, target = read_table(path, "price")
    pd.testing.assert_frame_equal(rest, cars[["age", "color"]])
    assert target.tolist() == [1, 2]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cars\.parquet cannot be read as a \.parquet table"):
        read_table(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"cars.parquet needs pyarrow.*featlearn\[tables\]"):
        read_table(path)


def test_what_there_is_instead(tmp_path):
    (tmp_path / "cars.csv").write_text(CSV)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"no column 'prize'.*'age', 'color', 'price'$"):
        read_table(tmp_path / "cars.csv", "prize")
    with pytest.raises(InputError, match=r"no file .*car\.csv.*the tables in that folder are 'cars\.csv'$"):
        read_table(tmp_path / "car.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="that folder holds no table"):
        read_table(tmp_path / "empty" / "cars.csv")
    with pytest.raises(InputError, match="no folder"):
        read_table(tmp_path / "nowhere" / "cars.csv")
    with pytest.raises(InputError, match=r"\.csv, .*\.parquet files, got 'notes\.txt'"):
        read_table(tmp_path / "notes.txt")
    (tmp_path / "wide.csv").write_text(",".join(f"c{i}" for i in range(50)) + "\n")
    with pytest.raises(InputError, match=r"'c19' and 30 more$"):
        read_table(tmp_path / "wide.csv", "y")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", "a.csv is empty. A table must start"),
        ("a.csv", b"a,b\n1,2\n1,2,3,4\n", "cannot be read as a .csv table"),
        ("a.csv", b"a,b\n\xff\xfe,2\n", "cannot be read as a .csv table.*utf-8"),
        ("a.csv.gz", b"a,b\n1,2\n", "cannot be read as a .csv.gz table"),
        # Without the time of day, which would be in the name of the test.
        ("a.csv.gz", gzip.compress(CSV.encode(), mtime=0)[:-12], "cannot be read as a .csv.gz table"),
    ],
)
def test_damaged_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_table(tmp_path / name)


def test_folder_of_data(tmp_path, monkeypatch):
    assert data_folder("uci121", tmp_path / "here") == tmp_path / "here"
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    assert data_folder("uci121") == tmp_path / "uci121"
    monkeypatch.setenv("FEATLEARN_DATA", "")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder("uci121") == tmp_path / "cache" / "featlearn" / "uci121"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder("uci121") == tmp_path / ".cache" / "featlearn" / "uci121"
