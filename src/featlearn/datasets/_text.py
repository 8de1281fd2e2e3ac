"""Text as tasks: characters to predict, and sentences to classify."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets._data_home import data_folder, not_present
from featlearn.errors import InputError

Part = Literal["train", "test"]

_SHAKESPEARE = "tinyshakespeare.txt"
_SENTENCES = "sst2_sentences"


@dataclass(frozen=True, eq=False)
class CharacterTask:
    """A text whose next character is to be predicted.

    Attributes:
        train: Characters to learn from, as positions in the vocabulary, ``(length,)`` integers.
        test: Characters to judge by, likewise: the end of the text.
        vocabulary: The characters that occur, in order.
    """

    train: Tensor
    test: Tensor
    vocabulary: str

    def encode(self, text: str) -> Tensor:
        """Positions of a text's characters in the vocabulary."""
        return _encoded(text, self.vocabulary)

    def decode(self, positions: Tensor) -> str:
        """The text of positions in the vocabulary."""
        return "".join(self.vocabulary[i] for i in positions.tolist())

    def batch(self, size: int, length: int, generator: torch.Generator, part: Part = "train") -> tuple[Tensor, Tensor]:
        """Pieces that start anywhere in the text, drawn with replacement, and the same one character later.

        Args:
            size: Number of pieces.
            length: Of a piece.
            generator: Advanced by the draw; an integer would give the same batch at every step.
            part: ``"train"`` or ``"test"``.

        Returns:
            Inputs and targets, ``(size, length)`` each.
        """
        text = self._part(part, length)
        if not isinstance(generator, torch.Generator):
            raise InputError(f"batches are drawn one after the other from a torch.Generator, got {generator!r}")
        if size < 1:
            raise InputError(f"a batch needs one piece or more, got size={size}")
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        pieces = text[starts + torch.arange(length + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def blocks(self, length: int, part: Part = "test") -> tuple[Tensor, Tensor]:
        """All of a part, cut into pieces one after the other; what is left at the end is dropped.

        Args:
            length: Of a piece.
            part: ``"train"`` or ``"test"``.

        Returns:
            Inputs and targets, ``(count, length)`` each.
        """
        text = self._part(part, length)
        end = (len(text) - 1) // length * length
        return text[:end].view(-1, length), text[1 : end + 1].view(-1, length)

    def _part(self, part: Part, length: int) -> Tensor:
        if part not in ("train", "test"):
            raise InputError(f"part must be 'train' or 'test', got {part!r}")
        text = self.train if part == "train" else self.test
        if not 1 <= length < len(text):
            raise InputError(f"the {part} text has {len(text)} characters; length must be from 1 to one less: {length}")
        return text


def character_task(
    path: str | os.PathLike[str] | None = None,
    *,
    test_share: float = 0.1,
    folder: str | os.PathLike[str] | None = None,
) -> CharacterTask:
    """Tiny Shakespeare, or another text, as characters (NFA paper, figure 2D and appendix J).

    As in nanoGPT, whose data the paper takes, the last tenth is for testing and the vocabulary is of the whole text.

    Args:
        path: Of a UTF-8 text; None reads ``tinyshakespeare.txt`` in the folder.
        test_share: Share of the characters, at the end, to test on; what is left is rounded down.
        folder: That holds the file; by default ``text`` in the folder that the environment variable FEATLEARN_DATA
            names, or else in featlearn's part of the user's cache folder.
    """
    if not 0 <= test_share < 1:
        raise InputError(f"test_share must be from 0 to below 1, got {test_share!r}")
    if path is None:
        where = data_folder("text", folder)
        path = where / _SHAKESPEARE
        if not path.is_file():
            raise not_present("text", where, [_SHAKESPEARE])
    text = _text(Path(path))
    if len(text) < 2:
        raise InputError(f"{Path(path).name} has {len(text)} characters: there is none to predict")
    vocabulary = "".join(sorted(set(text)))
    numbers = _encoded(text, vocabulary)
    cut = int((1 - test_share) * len(numbers))
    return CharacterTask(numbers[:cut], numbers[cut:], vocabulary)


def _encoded(text: str, vocabulary: str) -> Tensor:
    positions = {character: i for i, character in enumerate(vocabulary)}
    if unknown := sorted(set(text) - set(positions)):
        raise InputError(f"the vocabulary has no {', '.join(map(repr, unknown))}")
    return torch.tensor([positions[character] for character in text], dtype=torch.int64)


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends stay as they are
            return file.read()
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, eq=False)
class SentenceTask:
    """Sentences and their classes.

    Attributes:
        sentences: To learn from.
        y: Their classes, ``(n,)`` integers from 0 to ``classes - 1``; of SST-2, 0 is negative and 1 positive.
        sentences_test: To judge by.
        y_test: Their classes.
        classes: Number of classes.
    """

    sentences: tuple[str, ...]
    y: Tensor
    sentences_test: tuple[str, ...]
    y_test: Tensor
    classes: int


def sentence_task(
    n: int | None = None,
    n_test: int | None = None,
    *,
    test: Literal["test", "dev"] = "test",
    folder: str | os.PathLike[str] | None = None,
    generator: Seed = None,
) -> SentenceTask:
    """Sentences of film reviews with their sentiment (SST-2), drawn at random without replacement.

    The files have a sentence, a tab and a class a line, without a header: SST-2 has two classes, and files of the same
    form with more are read as well.

    Args:
        n: Number of training sentences; None takes all. With the same seed a smaller n is the beginning of a larger.
        n_test: Number of test sentences; None takes all.
        test: File to test on: ``"test"`` or ``"dev"``.
        folder: That holds train.tsv, dev.tsv and test.tsv; by default ``text/sst2_sentences`` in the folder that the
            environment variable FEATLEARN_DATA names, or else in featlearn's part of the user's cache folder.
        generator: Generator or integer seed of the draw.
    """
    if test not in ("test", "dev"):
        raise InputError(f"test must be 'test' or 'dev', got {test!r}")
    where = data_folder(f"text/{_SENTENCES}", folder)
    files = [where / "train.tsv", where / f"{test}.tsv"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise not_present(f"text/{_SENTENCES}", where, missing)
    rows, rows_test = (_sentences(file) for file in files)
    classes = max(number for _, number in rows + rows_test) + 1
    generator = as_generator(generator, "sentences")
    sentences, y = _drawn(rows, n, files[0].name, generator)
    # Drawn after the training sentences, which are then the same for every n_test.
    sentences_test, y_test = _drawn(rows_test, n_test, files[1].name, generator)
    return SentenceTask(sentences, y, sentences_test, y_test, classes)


def _sentences(path: Path) -> list[tuple[str, int]]:
    text = _text(path).replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise InputError(f"{path.name} is empty")
    rows = []
    for i, line in enumerate(text.split("\n")):  # splitlines would cut at other characters as well
        sentence, tab, number = line.rpartition("\t")
        if not tab or not (number.isascii() and number.isdigit()):
            raise InputError(f"line {i + 1} of {path.name} must be a sentence, a tab and a class, got {line[:60]!r}")
        rows.append((sentence, int(number)))
    return rows


def _drawn(
    rows: list[tuple[str, int]], n: int | None, name: str, generator: torch.Generator
) -> tuple[tuple[str, ...], Tensor]:
    count = len(rows) if n is None else n
    if not 0 <= count <= len(rows):
        raise InputError(f"from 0 to {len(rows)} sentences of {name} can be drawn, not {count}")
    kept = [rows[i] for i in torch.randperm(len(rows), generator=generator)[:count].tolist()]
    return tuple(sentence for sentence, _ in kept), torch.tensor([number for _, number in kept], dtype=torch.int64)
