"""Tests of checkpoints as they are found: nested, with several networks, other objects, and in all formats of torch."""

from __future__ import annotations

import argparse
import collections
import gzip
import io
import json
import pickle
import struct
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from featlearn.errors import InputError
from featlearn.spectra import weight_spectra
from featlearn.spectra._stored_tensor import StoredTensor
from featlearn.spectra.tensor_readers import CheckpointReader, open_source


class Attributes(dict[str, Any]):
    """Dict with attributes, as several libraries have one."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Wrapped:
    """Object of a user, whose class is not imported when a file is read."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Net(nn.Module):
    """Model that is saved as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.register_buffer("grid", torch.ones(3, 3))
        self.register_buffer("cache", torch.ones(5, 5), persistent=False)
        self.extra = [nn.Linear(4, 3)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def state(prefix: str = "") -> dict[str, torch.Tensor]:
    draw = generator()
    shapes = {"conv1.weight": (4, 3, 3), "fc.weight": (5, 7), "fc.bias": (5,)}
    return {f"{prefix}{name}": torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def taken(source: object) -> dict[str, StoredTensor]:
    return {t.name: t for t in open_source(source) if t.dtype and not t.reason}


def reasons(source: object) -> dict[str, str]:
    return {t.name: t.reason for t in open_source(source) if t.reason}


def same(source: object, expected: dict[str, torch.Tensor]) -> None:
    tensors = {name: t for t in open_source(source) if t.dtype for name in (t.name, *t.tied)}
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name].read(), tensor.detach()), name
        assert (tensors[name].shape, tensors[name].dtype) == (tuple(tensor.shape), str(tensor.dtype)[6:])


@pytest.mark.parametrize("saved", [True, False], ids=["file", "in memory"])
@pytest.mark.parametrize(
    ("checkpoint", "names"),
    [
        (lambda s: s, ""),
        (lambda s: {"model_state": s, "step": 3}, ""),
        (lambda s: {"ema": s, "decay": torch.tensor(0.9)}, ""),
        (lambda s: {"any_key": {"of_the_author": s}, "args": {"lr": 0.1}}, ""),
        (
            lambda s: {"state_dict": s, "step": torch.tensor(3), "class_embeddings": torch.ones(3, 4)},
            "class_embeddings",
        ),
        (lambda s: [1, {"net": s}], ""),
        (lambda s: collections.OrderedDict(module=collections.OrderedDict(s)), ""),
        (lambda s: {"generator": s, "discriminator": s}, "generator. discriminator."),
        (lambda s: {"generator": {"state_dict": s}, "ema": {"state_dict": s}}, "generator. ema."),
        (lambda s: {"nets": [s, s]}, "nets.0. nets.1."),
    ],
)
def test_state_dicts_anywhere(tmp_path: Path, checkpoint: Any, names: str, saved: bool) -> None:
    made = checkpoint(state())
    source: Any = made
    if saved or isinstance(made, list):  # a list is not a source by itself
        source = tmp_path / "file"
        torch.save(made, source)
    loose = {name for name in names.split() if not name.endswith(".")}
    prefixes = [name for name in names.split() if name.endswith(".")] or [""]
    every = {n for t in open_source(source) if len(t.shape) > 1 for n in (t.name, *t.tied)}
    assert every == {prefix + name for prefix in prefixes for name in ("conv1.weight", "fc.weight")} | loose


def test_several_networks_have_prefixes(tmp_path: Path) -> None:
    other = {name: tensor + 1 for name, tensor in state("module.").items()}
    torch.save({"generator": {"state_dict": state()}, "d": {"model": other}, "epoch": 3}, tmp_path / "gan.pth.tar")
    expected = {f"generator.{name}": tensor for name, tensor in state().items()}
    expected |= {f"d.model.{name}": tensor + 1 for name, tensor in state().items()}
    same(tmp_path / "gan.pth.tar", expected)
    assert reasons(tmp_path / "gan.pth.tar")["epoch"] == "not a tensor but int"


def test_names_stay_distinct() -> None:
    one, two, three = (torch.full((2, 2), float(i)) for i in range(3))
    tensors = taken({"a.b": one, "a": {"b": two, "state_dict": {"b": three}}})
    assert sorted(float(t.read()[0, 0]) for t in tensors.values()) == [0, 1, 2]


@pytest.mark.parametrize("key", ["optimizer", "optimizer_state", "g_optim", "optimizerD", "anything"])
def test_optimizer_states_are_not_weights(tmp_path: Path, key: str) -> None:
    net = nn.Linear(5, 4)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    file = tmp_path / "last.ckpt"
    torch.save({"net": net.state_dict(), key: optimizer.state_dict(), "lr_schedulers": [scheduler.state_dict()]}, file)
    same(file, net.state_dict())
    assert reasons(file)[key] == "optimizer state with 6 tensors, not weights"
    coverage = weight_spectra(file).coverage.set_index("parameter")
    assert not coverage["taken"][key]
    torch.save({key: optimizer.state_dict()}, file)
    with pytest.raises(InputError, match="must contain a state dict"):
        open_source(file)
    torch.save({"net": net, "optimizer": optimizer}, file)
    same(file, net.state_dict())
    flat = {"fc.weight": torch.ones(3, 3), "fc.weight.exp_avg": torch.ones(3, 3)}
    assert reasons(flat) == {"fc.weight.exp_avg": "optimizer state, not a weight"}
    safetensors.torch.save_file(flat, tmp_path / "flat")
    assert reasons(tmp_path / "flat") == reasons(flat)
    learned = {"optimizer_net": {"0.weight": torch.ones(3, 3)}, "net": {"0.weight": torch.ones(2, 2)}}
    assert set(taken(learned)) == {"optimizer_net.0.weight", "net.0.weight"}


def foreign() -> dict[str, Any]:
    """Return a checkpoint with objects of many classes beside the weights."""
    return {
        "model": state(),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "history": collections.defaultdict(list, loss=[np.float64(0.5), np.float32(1)]),
        "counts": collections.Counter("abca"),
        "queue": collections.deque([1, 2]),
        "config": Attributes(a=Attributes(b=1)),
        "object": Wrapped(kept=np.arange(6.0).reshape(2, 3)),
        "path": Path("a/b"),
        "set": {1, 2},
        "kinds": [torch.float32, torch.device("cpu"), torch.Size([1, 2]), np.dtype("f4"), range(3), 1j, b"x", slice(3)],
    }


# torch.save writes protocol 2 or later.
FORMS = [("pickle", p) for p in range(6)] + [(form, p) for form in ("zip", "legacy") for p in range(2, 6)]


@pytest.mark.parametrize(("form", "protocol"), FORMS)
def test_foreign_objects_stay_inert(tmp_path: Path, form: str, protocol: int) -> None:
    file = tmp_path / "with.model"
    if form == "pickle":
        file.write_bytes(pickle.dumps(foreign(), protocol=protocol))
    else:
        torch.save(foreign(), file, pickle_protocol=protocol, _use_new_zipfile_serialization=form == "zip")
    expected = {f"model.{name}": tensor for name, tensor in state().items()}
    expected["object.kept"] = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    same(file, expected)
    assert reasons(file)["args"] == "not a tensor but Namespace"


class Marked(torch.Tensor):
    """Subclass of Tensor."""


def test_subclasses_and_shared_modules(tmp_path: Path) -> None:
    shared = nn.Linear(4, 4)
    net = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared})
    net["b"].bias.note = "an attribute"
    marked = torch.ones(2, 3).as_subclass(Marked)
    marked.owner = "someone"
    file = tmp_path / "w"
    torch.save({"net": net, "marked": marked}, file)
    tensors = {t.name: t for t in open_source(file) if t.dtype}
    assert tensors["a.0.weight"].tied == ("b.weight",)
    assert torch.equal(tensors["marked"].read(), torch.ones(2, 3))
    cyclic: dict[str, Any] = {"net": state(), "self": None}
    cyclic["self"] = [cyclic, {"again": cyclic}]
    torch.save(cyclic, file)
    same(file, state())
    assert set(taken({"net": nn.Linear(3, 3), "step": 1})) == {"weight", "bias"}


def test_classes_need_not_exist(tmp_path: Path) -> None:
    module = types.ModuleType("long_gone")
    exec("import torch\nclass Model(torch.nn.Linear): pass\nclass Bag(dict): pass", module.__dict__)
    sys.modules["long_gone"] = module
    try:
        net = module.Model(4, 3)
        torch.save(module.Bag(model=net, best=module.Bag(x=1)), tmp_path / "m")
    finally:
        del sys.modules["long_gone"]
    same(tmp_path / "m", net.state_dict())
    assert "long_gone" not in sys.modules


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: {"net": net}, nn.DataParallel])
def test_whole_modules(tmp_path: Path, wrap: Any, new: bool) -> None:
    net = Net()
    file = tmp_path / "whole.pt"
    torch.save(wrap(net), file, _use_new_zipfile_serialization=new)
    expected = net.state_dict() | {f"extra.0.{name}": p for name, p in net.extra[0].state_dict().items()}
    same(file, expected)
    assert reasons(file)["grid"] == "a buffer, not a parameter"
    assert set(weight_spectra(file)) == {"body.0", "body.2", "extra.0"}


def test_weight_norm_in_a_whole_module(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning):
        net = nn.utils.weight_norm(nn.Linear(6, 5))
    torch.save(net.state_dict(), tmp_path / "state.pt")
    torch.save(nn.ModuleDict({"a": nn.Linear(3, 2)}), tmp_path / "dict.pt")
    assert set(weight_spectra(tmp_path / "state.pt")) == {"model"}
    assert set(weight_spectra(tmp_path / "dict.pt")) == {"a"}


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])
        self.register_buffer("scale", torch.full((4, 4), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return x + torch.arange(6.0).reshape(2, 3).sum() + self.scale.sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["script", "trace", "freeze"])
def test_torchscript(tmp_path: Path, how: str) -> None:
    net = Traced().eval()
    made = torch.jit.trace(net, torch.ones(2, 4)) if how == "trace" else torch.jit.script(net)
    file = tmp_path / "net.jit"
    if how == "freeze":
        torch.jit.save(torch.jit.freeze(made), file)
        weights = [t.read() for t in taken(file).values() if t.name.startswith("constants.c")]
        assert any(torch.equal(w, net.inner[0].weight) for w in weights)
        return
    made.save(file)
    tensors = {n: t for t in open_source(file) for n in (t.name, *t.tied)}
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensors[name].read(), tensor)
    assert {"inner.0", "inner.1"} <= set(weight_spectra(file))


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool, torch.uint16]


@pytest.mark.parametrize("new", [True, False])
def test_views_dtypes_and_ties(tmp_path: Path, new: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {str(d)[6:]: torch.ones(3, 2).to(d) for d in DTYPES if new or d != torch.uint16}
    tensors |= {"base": base, "part": base[1:3, ::2], "turned": base.T, "tied": base, "empty": torch.ones(0, 3)}
    tensors |= {"scalar": torch.tensor(3.0), "wide": torch.ones(1).expand(4, 5), "parameter": nn.Parameter(base + 1)}
    file = tmp_path / "w"
    torch.save(tensors, file, _use_new_zipfile_serialization=new)
    same(file, tensors)
    assert {t.name: t.tied for t in open_source(file)}["base"] == ("tied",)
    assert torch.equal(CheckpointReader().state(file)["tied"], base)


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_values(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8)
    tensors = {
        "a": torch.ones(3, 3),
        "quantized": quantized,
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(3, 3, device="meta"),
        "huge": torch.ones(1).expand(10_000, 10_000),
    }
    torch.save(tensors, tmp_path / "w.pt")
    assert set(taken(tmp_path / "w.pt")) == {"a"}
    told = reasons(tmp_path / "w.pt")
    assert told["quantized"] == "quantized"
    assert "sparse" in told["sparse"]
    assert "meta device" in told["meta"]
    assert "expanded" in told["huge"]


def old_tar(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file as torch 0.1 did: storages, tensors and a pickle in a tar archive."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return keys.get(id(value))

    keys = {id(tensor): 100 + i for i, tensor in enumerate(tensors.values())}
    storages, described, objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pickle.dump(len(tensors), storages, 2)
    pickle.dump(len(tensors), described, 2)
    for i, tensor in enumerate(tensors.values()):
        pickle.dump((i, "cpu", torch.FloatStorage), storages, 2)
        storages.write(struct.pack("<q", tensor.numel()) + tensor.numpy().tobytes())
        pickle.dump((100 + i, i, torch.FloatTensor), described, 2)
        sizes = (*tensor.shape, *tensor.stride(), 0)
        described.write(struct.pack("<ii", tensor.ndim, 0) + struct.pack(f"<{len(sizes)}q", *sizes))
    pickle.dump([], storages, 2)
    Pickler(objects, 2).dump({"model": tensors, "epoch": 1})
    with tarfile.open(file, "w:", format=tarfile.PAX_FORMAT) as archive:
        for name, stream in (
            ("sys_info", io.BytesIO()),
            ("pickle", objects),
            ("tensors", described),
            ("storages", storages),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(stream.getvalue())
            archive.addfile(info, io.BytesIO(stream.getvalue()))


def test_tar_archives_of_the_first_torch(tmp_path: Path) -> None:
    old_tar(tmp_path / "w.pth.tar", state())
    same(tmp_path / "w.pth.tar", state())
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.add(tmp_path / "w.pth.tar", "w.pth.tar")
    with pytest.raises(InputError, match="extract it, and pass a file of it"):
        open_source(tmp_path / "other.tar")


def test_other_byte_order(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    tensors = {"a": torch.ones(2, 2), "b": torch.tensor([1 + 2j, 3j], dtype=torch.complex128)}
    torch.save(tensors, file)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "big", "w", method) as new:
            for name in old.namelist():
                values = old.read(name)
                if "/data/" in name:
                    kind = "f8" if name.endswith("1") else "f4"
                    values = np.frombuffer(values, f"<{kind}").astype(f">{kind}").tobytes()
                new.writestr(name, b"big" if name.endswith("byteorder") else values)
        same(tmp_path / "big", tensors)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "lzma", "w", zipfile.ZIP_LZMA) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(InputError, match="compressed in a way that is not supported"):
        open_source(tmp_path / "lzma")
    file.write_bytes(pickle.dumps({"a": np.ones((2, 2), ">f4")}))
    same(file, {"a": torch.ones(2, 2)})


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_arrays_of_numpy(tmp_path: Path, protocol: int) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.asfortranarray(np.ones((3, 4), "f4")), "c": np.arange(3)}
    expected = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
    (tmp_path / "w.pkl").write_bytes(pickle.dumps(arrays, protocol=protocol))
    np.savez(tmp_path / "w", **arrays)
    np.savez_compressed(tmp_path / "w2.npz", **arrays)
    np.save(tmp_path / "w3.npy", arrays, allow_pickle=True)
    for name in ("w.pkl", "w.npz", "w2.npz", "w3.npy"):
        same((tmp_path / name).rename(tmp_path / f"{name}.renamed"), expected)
    np.save(tmp_path / "alone.npy", arrays["b"])
    same(tmp_path / "alone.npy", {"alone": expected["b"]})
    same(dict(arrays), expected)
    (tmp_path / "o.pkl").write_bytes(pickle.dumps({"text": np.array(["a"]), **arrays}, protocol=protocol))
    assert set(taken(tmp_path / "o.pkl")) == set(arrays)


def test_endings_do_not_matter(tmp_path: Path) -> None:
    for name in ("weights", "w.model", "w.safetensors", "w.onnx", "w.txt"):
        torch.save(state(), tmp_path / name)
        same(tmp_path / name, state())
        safetensors.torch.save_file(state(), tmp_path / name)
        same(tmp_path / name, state())


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_an_index_is_a_source(tmp_path: Path, form: str) -> None:
    shards = {name: {name: tensor} for name, tensor in state().items()}
    save = safetensors.torch.save_file if form == "safetensors" else torch.save
    stem = "model" if form == "safetensors" else "pytorch_model"
    places = {name: f"{stem}-{i}.{form}" for i, name in enumerate(shards)}
    for name, shard in shards.items():
        save(shard, tmp_path / places[name])
    index = tmp_path / f"{stem}.{form}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for source in (tmp_path, index, index.rename(tmp_path / "any.json")):
        if source.exists() and (source != tmp_path or index.exists()):
            same(source, state())
    index = tmp_path / "any.json"
    index.write_text(json.dumps({"weight_map": {"a": "any.json"}}))
    with pytest.raises(InputError, match=r"got the index 'any\.json'"):
        open_source(index)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(InputError, match=r"config\.json must be an index of weights"):
        open_source(tmp_path / "config.json")


def test_folders_of_trainers(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "pytorch_model")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"):
        torch.save({"state": {}}, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    same(tmp_path, state())


def zipped(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.bin", b"GGUF\3\0\0\0" + bytes(50), "gguf.GGUFReader"),
        ("m.bin", b"\x89HDF\r\n\x1a\n" + bytes(50), "h5py"),
        ("m.zip", zipped("metadata.json", "config.json", "model.weights.h5"), "keras.saving.load_model"),
        ("m.dat", b"\x08\x08\x12\x07pytorch\x1a\x052.1.0", "onnx.load"),
        ("m.onnx", b"\x3a\x05junk!", "onnx.load"),
        ("saved_model.pb", b"\x08\x01\x12\xa8\x01", "tf.train.load_checkpoint"),
        ("model.ckpt.data-00000-of-00001", bytes(64), "tf.train.load_checkpoint"),
        ("model.ckpt.index", bytes(30) + bytes.fromhex("57fb808b247547db"), "tf.train.load_checkpoint"),
        ("checkpoint", b'model_checkpoint_path: "ckpt-1"', "tf.train.load_checkpoint"),
        ("flax_model.msgpack", b"\x81\xa6params\x81", "flax.serialization.msgpack_restore"),
        ("flax", b"\x81\xa6params\x81", "flax.serialization.msgpack_restore"),
        ("m.tflite", b"\x1c\0\0\0TFL3" + bytes(20), "tf.lite.Interpreter"),
        ("m.pt2", zipped("m/archive_format", "m/models/model.json"), "torch.export.load"),
        ("m.pt", zipped("m/model.json", "m/tensors/0"), "torch.jit.load"),
        ("m.pt", zipped("m/.data/extern_modules", "m/model/model.pkl"), "torch.package.PackageImporter"),
        ("m.joblib", b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x8c\x13joblib.numpy_pickle", "joblib.load(file)"),
        ("__0_0.distcp", zipped("archive/data.pkl"), "dcp_to_torch_save"),
        ("m.mar", zipped("MAR-INF/MANIFEST.json", "model.pth"), "Extract it"),
        ("m.pt.gz", gzip.compress(b"x" * 50), "Decompress it"),
        ("m.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        ("m.pt", b"<!DOCTYPE html><html>404</html>", "web page"),
        ("m.pt", b"", "it is empty"),
        ("m.csv", b"a,b\n1,2\n", "damaged or not a checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else "bytes",
)
def test_other_formats_name_their_converter(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        open_source(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(name)


def test_folders_of_other_libraries(tmp_path: Path) -> None:
    for name, message in {
        "saved_model.pb": "tf.train",
        "_METADATA": "orbax",
        "__0_0.distcp": "dcp_to_torch_save",
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(zipped("archive/data.pkl") if "distcp" in name else b"\x08\x01\x12\x01")
        with pytest.raises(InputError, match=message):
            open_source(folder)
