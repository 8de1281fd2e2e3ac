import pytest
import torch

from featlearn.datasets import DataNotPresent, character_task, sentence_task
from featlearn.errors import InputError

TEXT = "to be, or not\r\nto be: é\n" * 20


def written(tmp_path, text=TEXT):
    path = tmp_path / "tinyshakespeare.txt"
    path.write_bytes(text.encode())
    return character_task(folder=tmp_path)


def test_characters(tmp_path):
    task = written(tmp_path)
    assert task.vocabulary == "".join(sorted(set(TEXT)))
    assert task.decode(torch.cat([task.train, task.test])) == TEXT
    assert len(task.train) == int(0.9 * len(TEXT))
    assert torch.equal(task.encode(TEXT[:30]), task.train[:30])
    assert task.train.dtype == torch.int64
    with pytest.raises(InputError, match="characters of the vocabulary only, got 'x', 'z'"):
        task.encode("zx to be")
    whole = character_task(tmp_path / "tinyshakespeare.txt", test_share=0)
    assert len(whole.train) == len(TEXT)


def test_batches_are_pieces_of_the_text(tmp_path):
    task = written(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "test"):
        text = task.decode(getattr(task, part))
        inputs, targets = task.batch(200, 7, generator, part)
        assert inputs.shape == targets.shape == (200, 7)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert all(task.decode(x) + task.decode(y[-1:]) in text for x, y in zip(inputs, targets, strict=True))
    assert not torch.equal(task.batch(5, 7, generator)[0], task.batch(5, 7, generator)[0])
    # The longest piece there can be has one start, and pieces reach the last character.
    inputs, targets = task.batch(3, len(task.test) - 1, generator, "test")
    assert torch.equal(inputs[0], task.test[:-1])
    assert torch.equal(targets[2], task.test[1:])


def test_blocks_go_through_the_text_once(tmp_path):
    task = written(tmp_path)
    inputs, targets = task.blocks(10, "train")
    count = (len(task.train) - 1) // 10
    assert inputs.shape == targets.shape == (count, 10)
    assert torch.equal(inputs.flatten(), task.train[: 10 * count])
    assert torch.equal(targets.flatten(), task.train[1 : 10 * count + 1])
    assert task.blocks(len(task.test) - 1)[0].shape == (1, len(task.test) - 1)


def test_characters_that_cannot_be(tmp_path):
    with pytest.raises(DataNotPresent, match=r"no tinyshakespeare\.txt in .*: put it there"):
        character_task(folder=tmp_path)
    task = written(tmp_path)
    generator = torch.Generator()
    for call, words in [
        (lambda: task.batch(2, 7, 0), "torch.Generator"),
        (lambda: task.batch(0, 7, generator), "size must be an integer of at least 1, got 0"),
        (lambda: task.batch(2, len(task.test), generator, "test"), "length must be"),
        (lambda: task.batch(2, 0, generator), "length must be"),
        (lambda: task.blocks(3, "dev"), "'train' or 'test'"),
        (lambda: character_task(test_share=1.0, folder=tmp_path), "test_share"),
        (lambda: character_task(tmp_path / "none.txt"), "cannot be read"),
        (lambda: written(tmp_path, "a"), "at least 2 characters, got 1"),
    ]:
        with pytest.raises(InputError, match=words):
            call()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8"):
        character_task(tmp_path / "latin.txt")


def sentences(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.tsv").write_bytes(text.encode())  # without a final newline, as the files are
    return folder


GOOD = {"train": "a film\t1\n'twas \"dull\t0\nwell\t\t1", "dev": "dev\t0", "test": "x\u2028\t0\r\ny\t1\r\n"}


def test_sentences(tmp_path, monkeypatch):
    sentences(tmp_path / "text" / "sst2_sentences", **GOOD)
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    task = sentence_task()
    assert set(zip(task.sentences, task.y.tolist(), strict=True)) == {("a film", 1), ("'twas \"dull", 0), ("well\t", 1)}
    assert set(zip(task.sentences_test, task.y_test.tolist(), strict=True)) == {("x\u2028", 0), ("y", 1)}
    assert task.classes == 2
    assert sentence_task(test="dev").sentences_test == ("dev",)
    few = sentence_task(2, 0)
    assert few.sentences == task.sentences[:2]
    assert few.y_test.shape == (0,)
    assert len({sentence_task(generator=seed).sentences for seed in range(20)}) > 1


def test_sentences_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setenv("FEATLEARN_DATA", str(tmp_path))
    with pytest.raises(DataNotPresent, match=r"no train\.tsv or dev\.tsv in .*above text/sst2_sentences$"):
        sentence_task(test="dev")
    folder = sentences(tmp_path / "s", **GOOD)
    for n, n_test in [(4, 1), (-1, 1), (1, 3)]:
        with pytest.raises(InputError, match=r"sentences of .*\.tsv must be from 0 to "):
            sentence_task(n, n_test, folder=folder)
    with pytest.raises(InputError, match="'test' or 'dev'"):
        sentence_task(test="train", folder=folder)
    for text, words in [
        ("", "test.tsv is empty"),
        ("fine\t1\nno class", "line 2 of test.tsv"),
        ("sentence\tlabel\nfine\t1", "line 1 of test.tsv must be"),
        ("fine\t-1", "line 1"),
        ("fine\t0.5", "line 1"),
    ]:
        sentences(folder, test=text)
        with pytest.raises(InputError, match=words):
            sentence_task(folder=folder)
