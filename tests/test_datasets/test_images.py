import gzip
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from featlearn.datasets import DataNotPresent, image_task, one_hot_labels
from featlearn.errors import InputError

RNG = np.random.default_rng(0)


def pictures(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist(folder, n=30, n_test=12, zipped=True):
    folder.mkdir(exist_ok=True)
    arrays = {}
    for part, m in (("train", n), ("t10k", n_test)):
        arrays[part] = pictures(m, 5, 4), np.arange(m, dtype=np.uint8) % 10
        for what, array in zip(("images-idx3", "labels-idx1"), arrays[part], strict=True):
            data, ending = (gzip.compress(idx(array), mtime=0), ".gz") if zipped else (idx(array), "")
            (folder / f"{part}-{what}-ubyte{ending}").write_bytes(data)
    return arrays


def same_rows(X, y, pixels, classes):
    """Whether the rows are the images, in any order."""
    ours = sorted((int(c), tuple((255 * x).round().int().flatten().tolist())) for x, c in zip(X, y, strict=True))
    theirs = sorted((int(c), tuple(p.flatten().tolist())) for p, c in zip(pixels, classes, strict=True))
    return ours == theirs


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist_files(tmp_path, monkeypatch, zipped):
    arrays = mnist(tmp_path / "mnist", zipped=zipped)
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    task = image_task("mnist")
    assert task.X.shape == (30, 20)
    assert (task.classes, task.image_shape, task.class_names) == (10, (1, 5, 4), tuple("0123456789"))
    assert task.X.dtype == torch.get_default_dtype()
    assert task.y.dtype == torch.int64
    assert same_rows(task.X, task.y, *arrays["train"])
    assert same_rows(task.X_test, task.y_test, *arrays["t10k"])
    assert image_task("mnist", flatten=False, folder=tmp_path / "mnist").X.shape == (30, 1, 5, 4)


def test_some_classes_in_the_order_asked_for(tmp_path):
    pixels, classes = mnist(tmp_path)["train"]
    task = image_task("mnist", classes=(7, 2), folder=tmp_path)
    assert (task.classes, task.class_names) == (2, ("7", "2"))
    kept = np.isin(classes, [2, 7])
    assert same_rows(task.X, task.y, pixels[kept], classes[kept] == 2)
    for classes in [(2, 2), (2, 12), (), "23", ("cat",)]:
        with pytest.raises(InputError, match="class"):
            image_task("mnist", classes=classes, folder=tmp_path)


def test_rows_are_drawn_by_seed(tmp_path):
    mnist(tmp_path)
    draw = lambda *args, **kwargs: image_task("mnist", *args, folder=tmp_path, **kwargs)  # noqa: E731
    state = torch.get_rng_state()
    few, many = draw(5, 3, generator=1), draw(20, 12, generator=1)
    assert torch.equal(few.X, many.X[:5])
    assert torch.equal(few.y, many.y[:5])
    assert torch.equal(few.X_test, many.X_test[:3])
    assert not torch.equal(few.X, draw(5, generator=2).X)
    assert torch.equal(draw(5, generator=1, dtype=torch.float64).X.float(), few.X)
    assert draw(5, 0).X_test.shape == (0, 20)
    assert torch.equal(torch.get_rng_state(), state)
    for n, n_test in [(31, 1), (5, 13), (1, 1), (5, -1)]:
        with pytest.raises(InputError, match=r"must be from .* images of these classes, got"):
            draw(n, n_test)


def test_what_gets_mean_zero_and_deviation_one(tmp_path):
    path = tmp_path / "set.npz"
    x = pictures(40, 3, 4, 3)
    x[:, 1, 2, 0] = 77  # does not vary, but for the test image
    x_test = pictures(9, 3, 4, 3)
    np.savez(path, x_train=x, y_train=np.arange(40) % 2, x_test=x_test, y_test=np.arange(9) % 2)
    plain = image_task(path, flatten=False, dtype=torch.float64)
    assert 0 <= plain.X.min() < 0.05
    assert 0.95 < plain.X.max() <= 1
    for what, axes in (("pixels", (0,)), ("channels", (0, 2, 3)), ("images", (1, 2, 3))):
        task = image_task(path, flatten=False, standardize=what, dtype=torch.float64)
        std, mean = torch.std_mean(task.X, axes, correction=0)
        torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-12, rtol=0)
        ones = torch.ones_like(std)
        if what == "pixels":
            ones[0, 1, 2] = 0
            assert not task.X_test[:, 0, 1, 2].any()
        torch.testing.assert_close(std, ones)
        if what == "channels":  # the training images' constants
            std, mean = torch.std_mean(plain.X, axes, correction=0, keepdim=True)
            torch.testing.assert_close(task.X_test, (plain.X_test - mean) / std)
    half = image_task(path, standardize="images", dtype=torch.bfloat16)
    assert half.X.dtype == torch.bfloat16
    with pytest.raises(InputError, match="'pixels', 'channels', 'images', None, got 'image'"):
        image_task(path, standardize="image")


@pytest.mark.parametrize("layout", ["last", "first", "gray", "float"])
def test_npz_layouts(tmp_path, layout):
    x, y = pictures(12, 6, 5, 3), np.arange(12)[:, None] % 3
    stored = {"last": x, "first": x.transpose(0, 3, 1, 2), "gray": x[..., 0], "float": x / 255}[layout]
    np.savez_compressed(tmp_path / "a.npz", X=stored, y=y, notes=np.zeros(3))
    task = image_task(str(tmp_path / "a.npz"), n=12, n_test=0, flatten=False)
    assert task.image_shape == ((1, 6, 5) if layout == "gray" else (3, 6, 5))
    channels_first = x[..., :1].transpose(0, 3, 1, 2) if layout == "gray" else x.transpose(0, 3, 1, 2)
    assert same_rows(task.X, task.y, channels_first, y[:, 0])


def test_a_set_that_is_not_split():
    task = image_task("digits", generator=3)
    assert (len(task.X), len(task.X_test)) == (1438, 359)
    assert (task.X.min(), task.X.max()) == (0, 1)
    rows = {tuple(x) for x in torch.cat([task.X, task.X_test]).tolist()}
    assert len(rows) == 1797  # no image on both sides
    assert len(image_task("digits", n=100).X_test) == 1697
    assert len(image_task("digits", n_test=100).X) == 1697
    with pytest.raises(InputError, match="n_test must be from 0 to 97 images of these classes, got 98"):
        image_task("digits", 1700, 98)
    with pytest.raises(InputError, match=r"folder must be None for 'digits'.*got"):
        image_task("digits", folder=".")


def cifar(folder, rows=4):
    folder.mkdir(parents=True)
    batches = {}
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        x, y = pictures(rows, 3, 32, 32), RNG.integers(0, 10, rows).astype(np.uint8)
        (folder / name).write_bytes(np.concatenate([y[:, None], x.reshape(rows, -1)], 1).tobytes())
        batches[name] = x, y
    return batches


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar_binary_batches(tmp_path, inner):
    batches = cifar(tmp_path / "c" / inner)
    task = image_task("cifar10", folder=tmp_path / "c", flatten=False)
    assert task.image_shape == (3, 32, 32)
    train = [batches[f"data_batch_{i}.bin"] for i in range(1, 6)]
    y = task.y.apply_(lambda i: NAMES.index(task.class_names[i]))
    assert same_rows(task.X, y, np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]))
    assert len(task.X_test) == 4


NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def test_cifar_as_npz(tmp_path):
    x, y = pictures(20, 32, 32, 3), np.arange(20, dtype=np.uint8) % 10
    np.savez(tmp_path / "any.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    task = image_task("cifar10", classes=("ship", 3), folder=tmp_path)
    assert task.class_names == ("ship", "cat")
    assert same_rows(task.X, task.y, x[[8, 18, 3, 13]].transpose(0, 3, 1, 2), [0, 0, 1, 1])
    np.savez(tmp_path / "other.npz", x_train=x, y_train=y)
    with pytest.raises(InputError, match=r"any\.npz, other\.npz"):
        image_task("cifar10", folder=tmp_path)
    (tmp_path / "other.npz").unlink()
    np.savez(tmp_path / "any.npz", X=x, y=y + 1)
    with pytest.raises(InputError, match="from 0 to 9, got 10"):
        image_task("cifar10", folder=tmp_path)


def test_svhn_files(tmp_path):
    x = pictures(11, 32, 32, 3)
    y = np.arange(1, 12).reshape(-1, 1) % 10
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)})
    task = image_task("svhn", folder=tmp_path)
    assert same_rows(task.X, task.y, x.transpose(0, 3, 1, 2), y[:, 0])
    assert task.class_names == tuple("0123456789")
    (tmp_path / "test_32x32.mat").write_bytes((tmp_path / "test_32x32.mat").read_bytes()[:3000])
    with pytest.raises(InputError, match=r"test_32x32\.mat is damaged"):
        image_task("svhn", folder=tmp_path)
    savemat(tmp_path / "test_32x32.mat", {"X": x})
    with pytest.raises(InputError, match="lacks y"):
        image_task("svhn", folder=tmp_path)


def save(folder, name, array):
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(folder / name)


@pytest.mark.parametrize("split", [False, True])
def test_folder_of_images(tmp_path, split):
    x = pictures(4, 5, 6, 3)
    for part in ("train", "test") if split else ("",):
        for i, name in enumerate(["dog", "cat"]):
            save(tmp_path / part / name, "one.png", x[2 * i])
            save(tmp_path / part / name, "two.PNG", x[2 * i + 1])
            (tmp_path / part / name / "notes.txt").write_text("")
    task = image_task(tmp_path, 4, 4 if split else 0)
    assert (task.class_names, task.image_shape) == (("cat", "dog"), (3, 5, 6))
    assert same_rows(task.X, task.y, x.transpose(0, 3, 1, 2), [1, 1, 0, 0])
    assert len(task.X_test) == (4 if split else 0)
    save(tmp_path / ("train" if split else "") / "cat", "three.png", x[0, :, :, 0])  # a gray one among colored
    assert image_task(tmp_path, 5, 0).image_shape == (3, 5, 6)


def test_folder_of_images_of_several_sizes(tmp_path):
    save(tmp_path / "a", "1.png", pictures(1, 4, 4)[0])
    save(tmp_path / "b", "2.png", np.full((8, 8), 51, np.uint8))
    with pytest.raises(InputError, match=r"1.png has 4x4 pixels and 2.png 8x8. Pass size="):
        image_task(tmp_path)
    task = image_task(tmp_path, 2, 0, size=3, flatten=False)
    assert task.X.shape == (2, 1, 3, 3)  # all gray
    torch.testing.assert_close(task.X[task.y == 1], torch.full((1, 1, 3, 3), 0.2))
    (tmp_path / "b" / "2.png").write_bytes((tmp_path / "b" / "2.png").read_bytes()[:40])
    with pytest.raises(InputError, match="damaged or not an image"):
        image_task(tmp_path)
    save(tmp_path / "b", "2.png", np.zeros((4, 4), np.uint16))
    with pytest.raises(InputError, match="more than 8 bits"):
        image_task(tmp_path)


def test_folders_that_hold_no_images(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="must hold one folder per class"):
        image_task(tmp_path)
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "test" / "b").mkdir(parents=True)
    with pytest.raises(InputError, match="must hold the same folders"):
        image_task(tmp_path)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mnist", r"train-images-idx3-ubyte\.gz, .* or t10k-labels-idx1-ubyte\.gz .*download=True"),
        ("cifar10", r"\.npz file .* or binary batches data_batch_1\.bin .*test_batch\.bin"),
        ("gtsrb", r"\.npz file with x_train, .*size=32"),
        ("svhn", r"train_32x32\.mat or test_32x32\.mat"),
    ],
)
def test_what_is_missing_is_one_sentence(tmp_path, monkeypatch, name, files):
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    with pytest.raises(DataNotPresent, match=rf"there is no {files}") as caught:
        image_task(name)
    text = str(caught.value)
    assert f"in {str(tmp_path / name)!r}: put" in text
    assert f"set FEATLEARN_DATA to the folder above {name}" in text
    assert "\n" not in text


def test_pickled_batches_are_refused(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"cos\nsystem\n")
    with pytest.raises(DataNotPresent, match="pickles can run code: get 'CIFAR-10 binary version'"):
        image_task("cifar10", folder=tmp_path)
    np.savez(tmp_path / "a.npz", X=np.array([{}, {}]), y=np.arange(2))
    with pytest.raises(InputError, match=r"a\.npz is damaged or not an \.npz file of plain arrays"):
        image_task(tmp_path / "a.npz")


IMAGES = idx(np.zeros((30, 5, 4), np.uint8))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "got nothing at its start"),
        (b"\x00\x00\x0d\x03" + IMAGES[4:], "must be an idx file of bytes, got 00 00 0d 03 at its start"),
        (IMAGES[:9], "truncated within its header"),
        (IMAGES[:-1], "must have 600 bytes .* got 599"),
        (IMAGES + b"0", "must have 600 bytes .* got 601"),
        (idx(np.zeros((29, 5, 4), np.uint8)), r"must be one per image, \(29,\), got shape \(30,\)"),
        (idx(np.zeros((30, 5), np.uint8)), "must be .n, height, width."),
    ],
)
def test_damaged_idx_files(tmp_path, content, words):
    mnist(tmp_path, zipped=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(InputError, match=words):
        image_task("mnist", folder=tmp_path)


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(IMAGES, mtime=0)[:-12]])
def test_damaged_gzip(tmp_path, content):
    mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(InputError, match="damaged or not gzipped"):
        image_task("mnist", folder=tmp_path)


def test_damaged_batches(tmp_path):
    cifar(tmp_path / "c")
    path = tmp_path / "c" / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"data_batch_3\.bin must be rows of 3073 bytes"):
        image_task("cifar10", folder=tmp_path / "c")
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(InputError, match="from 0 to 9, got 10"):
        image_task("cifar10", folder=tmp_path / "c")
    path.unlink()
    with pytest.raises(DataNotPresent):
        image_task("cifar10", folder=tmp_path / "c")


X, Y = pictures(6, 3, 3), np.arange(6) % 2


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X": X}, "lacks y; its arrays are X"),
        ({"a": X}, "lacks x_train and y_train"),
        ({"X": X, "y": Y[:5]}, r"one per image, \(6,\), got shape"),
        ({"X": X, "y": Y / 2}, "must be integers, got float64"),
        ({"X": X.astype(np.int32), "y": Y}, "bytes or floating-point numbers, got int32"),
        ({"X": X.astype(float), "y": Y}, "must be from 0 to 1"),
        ({"X": np.full((6, 3, 3), math.nan), "y": Y}, "must be from 0 to 1"),
        ({"X": X[0], "y": Y}, "must be .n, height, width."),
        ({"X": pictures(6, 5, 5, 5), "y": Y}, "1, 3 or 4 channels"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "must have the same shape"),
    ],
)
def test_npz_that_make_no_task(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=words):
        image_task(tmp_path / "a.npz")


def test_damaged_npz(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, X=X, y=Y)
    whole = path.read_bytes()
    for content in (b"", b"not zipped", whole[:100], whole[:60] + b"\xff\xff\xff" + whole[63:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged"):
            image_task(path)
    with path.open("wb") as file:
        np.save(file, X)
    with pytest.raises(InputError, match="lacks x_train and y_train; its arrays are none"):
        image_task(path)


def test_other_names(tmp_path):
    for name in ("minst", tmp_path / "none.npz"):
        with pytest.raises(InputError, match=r"must be one of cifar10, digits, gtsrb, mnist, svhn, .*, got "):
            image_task(name)
    with pytest.raises(InputError, match=r"folder= requires one of the names cifar10, .*got the path"):
        image_task("minst", folder=tmp_path)
    with pytest.raises(InputError, match="size= is for folders"):
        image_task("digits", size=4)
    with pytest.raises(InputError, match="download=True requires name 'mnist', got 'digits'"):
        image_task("digits", download=True)


def test_download_asks_openml(monkeypatch):
    x = pictures(60_002, 4).repeat(196, 1).astype(float)

    def fetch(name, *, version, as_frame, parser, return_X_y):
        assert (name, version, as_frame) == ("mnist_784", 1, False)
        return x, (np.arange(60_002) % 10).astype(str)

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    task = image_task("mnist", 10, download=True)
    assert task.image_shape == (1, 28, 28)
    assert same_rows(task.X_test, task.y_test, x[60_000:].astype(np.uint8), [0, 1])


def test_one_hot_labels():
    y = torch.tensor([1, 0, 2], dtype=torch.uint8)
    assert one_hot_labels(y, 3, torch.float64).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert one_hot_labels(y, 4).shape == (3, 4)
    assert one_hot_labels(y[:0], 4).shape == (0, 4)
    for wrong in (y.float(), y[:, None], torch.tensor([-1])):
        with pytest.raises(InputError):
            one_hot_labels(wrong, 3)
    with pytest.raises(InputError, match="from 0 to 1, got 0 to 2"):
        one_hot_labels(y, 2)
