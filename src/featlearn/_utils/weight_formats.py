"""Format of files of weights, recognized by their first bytes and without torch, whose import takes a second."""

from __future__ import annotations

import re
import struct
import zipfile
from pathlib import Path

from featlearn.errors import InputError

_HEAD = 4096
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_NOT_WEIGHTS = re.compile(r"(optimizer|scheduler|scaler|rng_state|random_states|training_args)[\w.-]*", re.IGNORECASE)
_FOREIGN = {
    "GGUF": (
        "a GGUF file",
        "Dequantize its tensors with {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in "
        "gguf.GGUFReader(file).tensors} and save them with numpy.savez('weights.npz', **tensors)",
    ),
    "GGML": ("a GGML file", "Convert it to GGUF with llama.cpp, or pass the weights that it was made from"),
    "ONNX": (
        "an ONNX model",
        "Save {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer} with "
        "numpy.savez('weights.npz', **tensors)",
    ),
    "Keras": (
        "a Keras model",
        "Save {w.path: w.numpy() for w in keras.saving.load_model(file).weights} with "
        "numpy.savez('weights.npz', **weights)",
    ),
    "HDF5": (
        "an HDF5 file, as of Keras",
        "Read its arrays with h5py.File(file).visititems, or keras.saving.load_model(file).weights, and save them with "
        "numpy.savez('weights.npz', **arrays)",
    ),
    "TensorFlow": (
        "a TensorFlow SavedModel or checkpoint",
        "Save {n: r.get_tensor(n) for n in r.get_variable_to_shape_map()} of r = tf.train.load_checkpoint(prefix), "
        "where prefix is 'variables/variables' in a SavedModel, with numpy.savez('weights.npz', **tensors)",
    ),
    "TensorFlow Lite": (
        "a TensorFlow Lite model",
        "Save {d['name']: i.get_tensor(d['index']) for d in i.get_tensor_details()} of i = tf.lite.Interpreter(file) "
        "with numpy.savez('weights.npz', **tensors)",
    ),
    "Flax": (
        "a Flax msgpack file",
        "Save flax.traverse_util.flatten_dict(flax.serialization.msgpack_restore(data), sep='.') with "
        "numpy.savez('weights.npz', **tensors)",
    ),
    "Orbax": (
        "an Orbax checkpoint",
        "Save flax.traverse_util.flatten_dict(orbax.checkpoint.PyTreeCheckpointer().restore(folder), sep='.') with "
        "numpy.savez('weights.npz', **tensors)",
    ),
    "DCP": (
        "a distributed checkpoint of torch",
        "Convert it with torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, 'model.pt')",
    ),
    "torch.export": (
        "an exported program of torch.export",
        "Save torch.export.load(file).state_dict with safetensors.torch.save_file",
    ),
    "torch.package": (
        "an archive of torch.package, which contains code",
        "If you trust it, load the model with torch.package.PackageImporter(file).load_pickle and save "
        "model.state_dict() with torch.save",
    ),
    "joblib": (
        "a file of joblib, which can execute code",
        "If you trust it, save the arrays of joblib.load(file) with numpy.savez('weights.npz', **arrays)",
    ),
    "old TorchScript": (
        "a TorchScript archive of torch before 1.4",
        "Save torch.jit.load(file).state_dict() with safetensors.torch.save_file",
    ),
    "MXNet": (
        "a file of MXNet",
        "Save {n: a.asnumpy() for n, a in mxnet.nd.load(file).items()} with numpy.savez('weights.npz', **tensors)",
    ),
    "Core ML": ("a Core ML model", "Pass the weights that it was converted from"),
    "compressed": ("a compressed file", "Decompress it and pass the file inside"),
    "LFS": ("a pointer of Git LFS instead of the weights", "Download them with git lfs pull"),
    "HTML": ("a web page", "Download the file itself: the link or the token was not accepted"),
}
_MAGIC = {
    b"GGUF": "GGUF",
    b"lmgg": "GGML",
    b"tjgg": "GGML",
    b"fmgg": "GGML",
    b"\x89HDF\r\n\x1a\n": "HDF5",
    b"\x12\x01\x00\x00\x00\x00\x00\x00": "MXNet",
    b"\x1f\x8b": "compressed",
    b"BZh": "compressed",
    b"\xfd7zXZ\x00": "compressed",
    b"\x28\xb5\x2f\xfd": "compressed",
    b"7z\xbc\xaf\x27\x1c": "compressed",
    b"Rar!": "compressed",
    b"version https://git-lfs": "LFS",
    b"model_checkpoint_path:": "TensorFlow",
}
# Protocol buffers and flat files have no magic number, so the ending has to decide.
_ENDINGS = {
    ".gguf": "GGUF",
    ".ggml": "GGML",
    ".onnx": "ONNX",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".keras": "Keras",
    ".pb": "TensorFlow",
    ".tflite": "TensorFlow Lite",
    ".msgpack": "Flax",
    ".mlmodel": "Core ML",
    ".mlpackage": "Core ML",
    ".params": "MXNet",
    ".pt2": "torch.export",
}


def weight_format(file: Path) -> str:
    """Return the format of a file of weights, whatever its ending is.

    Args:
        file: File that exists.

    Returns:
        One of "safetensors", "torch zip", "torch tar", "pickle", "npy", "npz" and "index", which is the JSON index of
        files with parts of a model.

    Raises:
        InputError: If the file has another format; the message names the call that converts it.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            head = opened.read(_HEAD)
            opened.seek(max(size - 8, 0))
            tail = opened.read(8)
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror or error}.") from error
    if not size:
        expected = "safetensors file" if file.suffix == ".safetensors" else "file of weights"
        raise InputError(f"{file.name} cannot be read as a {expected} (it is empty). Copy or download it again.")
    if file.suffix == ".distcp":  # zip archives one after the other
        raise _refusal(file.name, "DCP")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_format(file)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if _is_safetensors(head, size):
        return "safetensors"
    if foreign := _foreign_bytes(file.name, head, tail):
        raise _refusal(file.name, foreign)
    if head[257:262] == b"ustar":
        return "torch tar"
    if head.lstrip().startswith(b"{"):
        if file.name.endswith(".index.json") or b'"weight_map"' in head or file.suffix == ".json":
            return "index"
    elif _is_pickle(head, tail):
        if b"joblib.numpy_pickle" in head:  # has arrays between the instructions of its pickle
            raise _refusal(file.name, "joblib")
        return "pickle"
    if file.suffix == ".safetensors":
        raise InputError(
            f"{file.name} cannot be read as a safetensors file (its header is damaged). Copy or download it again."
        )
    if file.suffix.lower() in _ENDINGS:
        raise _refusal(file.name, _ENDINGS[file.suffix.lower()])
    raise InputError(
        f"{file.name} must be a checkpoint of tensors only, but it is damaged or not a checkpoint, and a pickle is "
        "never executed. Save model.state_dict(), preferably as safetensors."
    )


def weight_files(path: Path, argument: str = "source") -> list[Path]:
    """Return the files of a model: the file itself, or those of a folder.

    Args:
        path: File or folder.
        argument: Name of the argument, for error messages.

    Returns:
        One file, which can be an index, or the files that contain parts of the model.

    Raises:
        InputError: If the path does not exist, or the files do not have a known format.
    """
    try:
        folder, exists, regular = path.is_dir(), path.exists(), path.is_file()
    except (OSError, ValueError) as error:  # as for a name with a null character, or a name that is too long
        raise InputError(f"{argument} must be a path, got {str(path)[:80]!r} ({error}).") from error
    if folder:
        return _folder_files(path)
    if not exists:
        raise InputError(f"{argument} {str(path)!r} does not exist.")
    if not regular:  # reading a pipe would wait for its writer
        raise InputError(f"{argument} {str(path)!r} must be a file or a folder of weights, got a device or a pipe.")
    weight_format(path)
    return [path]


def _folder_files(folder: Path) -> list[Path]:
    try:
        files = sorted(f for f in folder.iterdir() if f.is_file())
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be read: {error.strerror or error}.") from error
    for ending in (".safetensors.index.json", ".bin.index.json"):
        indices = [f for f in files if f.name.endswith(ending)]
        if len(indices) > 1:
            raise InputError(
                f"{str(folder)!r} must contain one index, got {len(indices)}. Pass one of the weight files."
            )
        if indices:
            return indices
    names = {f.name for f in files}
    if any(name.endswith(".distcp") for name in names):
        raise _refusal(folder.name, "DCP")
    formats = {f: _format_or_none(f) for f in files}
    safe = [f for f in files if formats[f] == "safetensors" or f.suffix == ".safetensors"]
    if safe:
        return [f for f in safe if weight_format(f)]
    weights = [f for f in files if formats[f] in ("torch zip", "npz", "torch tar") or f.suffix in _SUFFIXES]
    weights = [f for f in weights if not _NOT_WEIGHTS.fullmatch(f.name)] or weights
    named = [f for f in weights if f.name == "pytorch_model.bin"] or weights
    if len(named) == 1:
        return named if weight_format(named[0]) else []
    if named:
        listed = ", ".join(repr(f.name) for f in named[:3])
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        raise InputError(f"{str(folder)!r} must contain one checkpoint, got {listed}{more}. Pass one of them.")
    if "saved_model.pb" in names or any(name.endswith(".index") for name in names):
        raise _refusal(folder.name, "TensorFlow")
    if names & {"_METADATA", "_CHECKPOINT_METADATA"}:
        raise _refusal(folder.name, "Orbax")
    for file in files:
        if file.suffix.lower() in _ENDINGS:
            weight_format(file)
    known = ", ".join(_SUFFIXES)
    raise InputError(f"No weights in {str(folder)!r}: it must contain a {known} file.")


def _format_or_none(file: Path) -> str | None:
    try:
        return weight_format(file)
    except InputError:
        return None


def _refusal(name: str, kind: str) -> InputError:
    label, advice = _FOREIGN[kind]
    return InputError(f"{name} must be weights of torch, safetensors or numpy, got {label}. {advice}.")


def _is_safetensors(head: bytes, size: int) -> bool:
    if len(head) < 10 or head[8:9] != b"{":
        return False
    (length,) = struct.unpack("<Q", head[:8])
    return bool(2 <= length <= size - 8)


def _is_pickle(head: bytes, tail: bytes) -> bool:
    """Return whether a file starts as a pickle; those of protocols 0 and 1 have no number but end in a dot."""
    if head[:1] == b"\x80":
        return len(head) > 1 and head[1] <= 5
    return head[:1] in (b"(", b"]", b"}", b"c", b"i") and tail[-1:] == b"."


def _foreign_bytes(name: str, head: bytes, tail: bytes) -> str:
    """Return the name of a format that is not read; empty if the bytes belong to none."""
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[4:8] == b"TFL3":
        return "TensorFlow Lite"
    if re.match(rb"\s*<(!doctype html|html|\?xml)", head, re.IGNORECASE):
        return "HTML"
    # The last bytes of the table of a TensorFlow checkpoint.
    if tail == b"\x57\xfb\x80\x8b\x24\x75\x47\xdb" or re.search(r"\.data-\d{5}-of-\d{5}$|\.ckpt\.meta$", name):
        return "TensorFlow"
    # A message of the version of the format, followed by a text or a message: ONNX, or a SavedModel.
    if head[:1] == b"\x08" and 1 <= head[1] <= 32 and head[2:3] in (b"\x12", b"\x1a", b"\x3a", b"\x42"):
        return "TensorFlow" if name.endswith(".pb") else "ONNX"
    packed = head[:1] in (b"\xde", b"\xdf") or b"\x81" <= head[:1] <= b"\x8f"
    if packed and (name.endswith(".msgpack") or (b"\xa0" <= head[1:2] <= b"\xbf" and head[2:3].isalpha())):
        return "Flax"
    return ""


def _zip_format(file: Path) -> str:
    try:
        with zipfile.ZipFile(file) as opened:
            names = opened.namelist()
    except Exception as error:  # a hostile directory can raise any exception
        raise InputError(
            f"{file.name} must be a checkpoint of tensors only, but its zip archive is damaged or incomplete. "
            "Copy or download it again."
        ) from error
    last = {name.rpartition("/")[2] for name in names}
    if "data.pkl" in last:
        return "torch zip"
    if any(name.endswith(".npy") for name in names):
        return "npz"
    if "model.weights.h5" in last or file.suffix == ".keras":
        raise _refusal(file.name, "Keras")
    if last & {"serialized_exported_program.json", "archive_format"} or file.suffix == ".pt2":
        raise _refusal(file.name, "torch.export")
    if "extern_modules" in last:
        raise _refusal(file.name, "torch.package")
    if "model.json" in last and any("/tensors/" in f"/{name}" for name in names):
        raise _refusal(file.name, "old TorchScript")
    listed = ", ".join(repr(name[:60]) for name in names[:3]) or "nothing"
    raise InputError(
        f"{file.name} must be weights of torch, safetensors or numpy, got a zip archive of {listed}. "
        "Extract it and pass the file of weights."
    )
