"""Reports: tables, pictures, and files that survive being killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from matplotlib.figure import Figure
from pandas.testing import assert_frame_equal
from torch import Tensor, nn

import featlearn as fl
from processes import run_code


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).pow(2).sum(1)


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm((5,)), nn.Linear(5, 2)
        ).double()


def report(**arguments: object) -> fl.Report:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((9, 2, 5), (9, 2)))
    everything: dict[str, object] = {"initial": net(1), "loss": squared, "weight_decay": 0.1} | arguments
    return fl.probe(net(), [(x, y)], **everything)  # type: ignore[arg-type]


def assert_equal(a: fl.Report, b: fl.Report) -> None:
    assert list(a) == list(b)
    assert (a.samples, a.outputs, a.parameters) == (b.samples, b.outputs, b.parameters)
    for name in a:
        f, g = a[name], b[name]
        assert (f.name, f.kind, f.shape, f.weight_decay, f.flags) == (g.name, g.kind, g.shape, g.weight_decay, g.flags)
        for one, other in ((f.weights, g.weights), (f.sums, g.sums)):
            assert set(one) == set(other)
            for key, value in one.items():
                assert value.dtype == other[key].dtype
                assert torch.equal(value, other[key])
    assert_frame_equal(a.table(), b.table())
    assert_frame_equal(a.coverage, b.coverage)
    assert repr(a) == repr(b)


@pytest.mark.parametrize("outputs", ["exact", 4, 1])
def test_round_trip(outputs: str | int, tmp_path: Path) -> None:
    before = report(outputs=outputs)
    before.save(tmp_path / "deep" / "folder")
    after = fl.Report.load(tmp_path / "deep" / "folder")
    assert_equal(before, after)
    assert after["0"].standard_error() == pytest.approx(before["0"].standard_error(), nan_ok=True)
    for name in before:
        assert torch.equal(before[name].agop, after[name].agop)
        assert torch.equal(before[name].fact, after[name].fact)


def test_the_files_are_json_and_safetensors_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").write_text("mine")
    (tmp_path / ".notes.tmp").write_text("mine")
    (tmp_path / "matrices-of-mine.safetensors").write_text("mine")
    for _ in range(3):
        report().save(tmp_path)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 5, names
    assert {"report.json", "notes.tmp", ".notes.tmp", "matrices-of-mine.safetensors"} < set(names)
    described = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert described["schema_version"] == 1
    assert described["table"][0]["layer"] == "0"


def test_saving_replaces_an_older_report(tmp_path: Path) -> None:
    report(measure="nfc").save(tmp_path)
    new = report()
    new.save(tmp_path)
    assert_equal(new, fl.Report.load(tmp_path))


def test_a_layer_without_gradients_survives_the_trip(tmp_path: Path) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    before = fl.probe(Unused(), torch.randn(4, 3))
    before.save(tmp_path)
    assert_equal(before, fl.Report.load(tmp_path))


def damage(folder: Path, kind: str) -> None:
    described = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    tensors = folder / described["tensors"]
    match kind:
        case "no JSON":
            (folder / "report.json").write_text("{", encoding="utf-8")
        case "binary":
            (folder / "report.json").write_bytes(b"\xff\xfe\x00")
        case "a list":
            (folder / "report.json").write_text("[1]", encoding="utf-8")
        case "newer":
            (folder / "report.json").write_text(json.dumps(described | {"schema_version": 2}), encoding="utf-8")
        case "no version":
            del described["schema_version"]
            (folder / "report.json").write_text(json.dumps(described), encoding="utf-8")
        case "missing part":
            del described["layers"]
            (folder / "report.json").write_text(json.dumps(described), encoding="utf-8")
        case "missing":
            (folder / "report.json").unlink()
        case "no tensors":
            tensors.unlink()
        case "cut tensors":
            tensors.write_bytes(tensors.read_bytes()[:50])
        case "no header":
            tensors.write_bytes(b"")


@pytest.mark.parametrize(
    "kind",
    [
        "no JSON",
        "binary",
        "a list",
        "newer",
        "no version",
        "missing part",
        "missing",
        "no tensors",
        "cut tensors",
        "no header",
    ],
)
def test_a_damaged_report_is_refused(kind: str, tmp_path: Path) -> None:
    report(measure="nfc").save(tmp_path)
    damage(tmp_path, kind)
    with pytest.raises(fl.InputError, match=r"report|schema_version"):
        fl.Report.load(tmp_path)


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(fl.InputError, match="is a file"):
        report(measure="nfc").save(file)
    assert file.read_text() == "mine"
    for path in (file, tmp_path / "nothing"):
        with pytest.raises(fl.InputError, match="report"):
            fl.Report.load(path)


SAVER = """
import os, random, signal, sys, time
import torch, featlearn as fl
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Tanh(), torch.nn.Linear(400, 2))
report = fl.probe(model, torch.randn(20, 300))
report.table()
report.save(sys.argv[1])
random.seed(0)
most = 0
for _ in range(20):
    child = os.fork()
    if child == 0:
        while True:
            report.save(sys.argv[1])
    time.sleep(0.1 * random.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    most = max(most, len(os.listdir(sys.argv[1])))
    loaded = fl.Report.load(sys.argv[1])
    assert loaded.samples == 20
    assert torch.equal(loaded["0"].sums["K"], report["0"].sums["K"])
print(most)
report.save(sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_while_saving_leaves_a_report(tmp_path: Path) -> None:
    result = run_code(SAVER, tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 2, "no save was cut short: the test shows nothing"
    assert len(list(tmp_path.iterdir())) == 2, "the last save tidies up what the killed ones left"


def test_columns_follow_the_arguments() -> None:
    always = ["kind", "shape", "nfc", "bagop", "flags"]
    assert list(report(initial=None, loss=None, weight_decay=None).table("all").columns) == always
    with_loss = list(report(initial=None, weight_decay=None).table("all").columns)
    assert {"enfa", "benfa"} == set(with_loss) - set(always)
    with_decay = list(report(initial=None).table("all").columns)
    facts = {"fact", "fact_symmetric", "bfact", "bfact_symmetric", "relgrad", "relgrad_noise"}
    assert facts == set(with_decay) - set(with_loss)
    with_initial = list(report(loss=None, weight_decay=None).table("all").columns)
    assert set(with_initial) - set(always) == {
        "centered_nfc",
        "double_centered_nfc",
        "ptk_centered_nfc",
        "centered_ratio",
        "double_centered_ratio",
        "weight_change",
        "weight_change_relative",
    }
    table = report().table()
    assert {"nfc", "centered_nfc", "fact", "enfa", "relgrad"} <= set(table.columns)
    assert {"bagop", "fact_symmetric"}.isdisjoint(table.columns)
    assert list(report().table("bfact").columns) == ["kind", "shape", "bfact", "flags"]
    with pytest.raises(fl.InputError, match=r"columns must be one of 'nfc'.* got 'nothing'"):
        report().table(["nothing"])
    assert table.index.name == "layer"
    assert list(table.index) == ["0", "3", "5"]
    assert table["shape"].tolist() == ["2 x 2x3", "5x12", "2x5"]


@pytest.mark.parametrize("kind", ["cosine", "pearson"])
@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("diagonal", [False, True])
def test_the_table_shows_the_correlations_of_the_layers(kind: str, power: float, diagonal: bool) -> None:
    result = report()
    table = result.table(kind=kind, power=power, diagonal=diagonal)
    for name, features in result.items():
        expected = features.correlation("agop", kind=kind, power=power, diagonal=diagonal)
        assert table["nfc"][name] == expected
        assert table["fact"][name] == features.correlation("fact", kind=kind, diagonal=diagonal)


def test_measure_picks_the_columns() -> None:
    assert list(report(measure=["nfc"]).table().columns) == ["kind", "shape", "nfc", "flags"]
    only = report(measure="fact", initial=None).table()
    assert {"nfc", "enfa"}.isdisjoint(only.columns)
    assert "fact" in only.columns


def test_coverage() -> None:
    table = report().coverage
    assert list(table.columns) == ["parameter", "shape", "taken", "layers", "role", "reason", "tied_to"]
    assert table.set_index("parameter").loc["0.weight", "shape"] == "4x1x3"
    assert table.taken.all()
    partial = report(layers="3").coverage.set_index("parameter")
    assert partial.loc["0.weight", "reason"] == "left out by the layers argument"
    assert partial.loc["3.weight", "layers"] == "3"


def test_the_text_names_what_was_measured() -> None:
    text = repr(report())
    assert "Report of 3 layers, 9 samples, 2 outputs" in text
    assert all(name in text for name in ("nfc", "fact", "2 x 2x3", "5x12"))
    assert max(map(len, text.splitlines())) <= 80


def test_a_report_is_a_mapping() -> None:
    result = report()
    assert len(result) == 3
    assert "0" in result
    with pytest.raises(KeyError, match=r"no layer '1'.*'0', '3', '5'"):
        result["1"]


def test_pictures_leave_the_global_state_alone() -> None:
    import matplotlib.pyplot as plt

    mine = plt.figure()
    before, style = plt.get_fignums(), dict(mpl.rcParams)
    figure = report().plot()
    assert isinstance(figure, Figure)
    assert plt.get_fignums() == before
    assert dict(mpl.rcParams) == style
    assert plt.fignum_exists(mine.number)
    assert isinstance(report().plot(["nfc", "relgrad"], kind="pearson"), Figure)
    assert isinstance(report(outputs=4).plot(), Figure)
    with pytest.raises(fl.InputError, match=r"columns must be one of.* got 'nothing'"):
        report().plot(["nothing"])
    with pytest.raises(fl.InputError, match="no measurement of fact"):
        report(loss=None, weight_decay=None).plot(["nfc", "fact"])
    with pytest.raises(fl.InputError, match="no measurement of nfc"):
        report(measure="nfm").plot()
    plt.close(mine)


def test_unknown_names_are_refused() -> None:
    features = report()["0"]
    with pytest.raises(fl.InputError, match=r"must be a feature matrix.* got 'nothing'"):
        features.matrix("nothing")
    with pytest.raises(fl.InputError, match=r"name must be one of.* got 'nothing'"):
        features.correlation("nothing")
    with pytest.raises(fl.InputError, match="kind must be"):
        features.correlation("agop", kind="spearman")
    with pytest.raises(fl.InputError, match="symmetric"):
        features.matrix("fact", power=0.5)


@pytest.mark.parametrize(
    "name", ["fact", "enfa", "benfa", "centered_nfc", "double_centered_nfc", "weight_change", "relgrad"]
)
def test_what_was_not_measured_says_so(name: str) -> None:
    features = report(initial=None, loss=None, weight_decay=None)["0"]
    with pytest.raises(fl.NotMeasuredError, match=r"loss=|initial="):
        getattr(features, name)
