"""Text tasks: prediction of characters, and classification of sentences.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number, check_option
from featlearn.datasets._base import data_folder, not_present
from featlearn.errors import InputError

Part = Literal["train", "test"]
_PathLike = str | os.PathLike[str]

_SHAKESPEARE = "tinyshakespeare.txt"
_SENTENCES = "sst2_sentences"


@dataclass(frozen=True, eq=False)
class CharacterTask:
    """Text for the prediction of the next character.

    Attributes:
        train: Training characters as positions in the vocabulary, integers of shape ``(length,)``.
        test: Test characters, the end of the text, as positions in the vocabulary, shape ``(length,)``.
        vocabulary: Characters of the text, sorted.

    Example:
        >>> import torch
        >>> from featlearn.datasets import CharacterTask
        >>> task = CharacterTask(torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1]), "abc")
        >>> task.encode("cab").tolist()
        [2, 0, 1]
        >>> inputs, targets = task.blocks(4, part="train")
        >>> task.decode(inputs[0]), task.decode(targets[0])
        ('abca', 'bcab')
        >>> inputs, targets = task.batch(8, 3, torch.Generator().manual_seed(0))
        >>> inputs.shape, targets.shape
        (torch.Size([8, 3]), torch.Size([8, 3]))
    """

    train: Tensor
    test: Tensor
    vocabulary: str

    def encode(self, text: str) -> Tensor:
        """Convert a text to positions in the vocabulary.

        Args:
            text: Text with characters of the vocabulary.

        Returns:
            Positions, integers of shape ``(length,)``.

        Raises:
            InputError: The vocabulary lacks a character.
        """
        return _encoded(text, self.vocabulary)

    def decode(self, positions: Tensor) -> str:
        """Convert positions in the vocabulary to a text.

        Args:
            positions: Positions, integers of shape ``(length,)``.

        Returns:
            The text.
        """
        return "".join(self.vocabulary[i] for i in positions.tolist())

    def batch(self, size: int, length: int, generator: torch.Generator, part: Part = "train") -> tuple[Tensor, Tensor]:
        """Draw pieces of the text with replacement, and the same pieces one character later.

        Args:
            size: Number of pieces, at least 1.
            length: Number of characters of a piece.
            generator: Generator, which is advanced by the draw. A seed would give the same batch at every step.
            part: Part of the text, ``"train"`` or ``"test"``.

        Returns:
            Inputs and targets, shape ``(size, length)`` each.

        Raises:
            InputError: An argument is not allowed.
        """
        text = self._part(part, length)
        if not isinstance(generator, torch.Generator):
            raise InputError(
                f"generator must be a torch.Generator that advances from batch to batch, got {generator!r}"
            )
        check_int("size", size)
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        pieces = text[starts + torch.arange(length + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def blocks(self, length: int, part: Part = "test") -> tuple[Tensor, Tensor]:
        """Cut a part into successive pieces; an incomplete piece at the end is dropped.

        Args:
            length: Number of characters of a piece.
            part: Part of the text, ``"train"`` or ``"test"``.

        Returns:
            Inputs, and targets one character later, shape ``(count, length)`` each.

        Raises:
            InputError: An argument is not allowed.
        """
        text = self._part(part, length)
        end = (len(text) - 1) // length * length
        return text[:end].view(-1, length), text[1 : end + 1].view(-1, length)

    def _part(self, part: Part, length: int) -> Tensor:
        check_option("part", part, ("train", "test"))
        text = self.train if part == "train" else self.test
        if not 1 <= length < len(text):
            raise InputError(f"length must be from 1 to {len(text) - 1} for the {part} text, got {length}")
        return text


def character_task(
    path: _PathLike | None = None, *, test_share: float = 0.1, folder: _PathLike | None = None
) -> CharacterTask:
    """Create a character task from Tiny Shakespeare or another text (NFA paper, figure 2D and appendix J).

    As in nanoGPT, whose data the paper uses, the test part is the last tenth of the text, and the vocabulary is that of
    the whole text.

    Args:
        path: UTF-8 text file. None is ``tinyshakespeare.txt`` in the folder.
        test_share: Share of the characters in the test part, from 0 to below 1; the length of the training part is
            rounded down.
        folder: Folder of the file. None is ``text`` in the folder of the environment variable FEATLEARN_DATA, or else
            in the folder ``featlearn`` of the user's cache.

    Returns:
        The task.

    Raises:
        DataNotPresent: ``tinyshakespeare.txt`` is missing.
        InputError: The file cannot be read, or has fewer than two characters.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.datasets import character_task
        >>> file = Path(tempfile.mkdtemp()) / "text.txt"
        >>> _ = file.write_text("abcabcabca")
        >>> task = character_task(file, test_share=0.2)
        >>> task.vocabulary, task.train.tolist(), task.decode(task.test)
        ('abc', [0, 1, 2, 0, 1, 2, 0, 1], 'ca')
    """
    check_number("test_share", test_share, 0, below=1)
    if path is None:
        where = data_folder("text", folder)
        path = where / _SHAKESPEARE
        if not path.is_file():
            raise not_present("text", where, [_SHAKESPEARE])
    text = _text(Path(path))
    if len(text) < 2:
        raise InputError(f"{Path(path).name} must have at least 2 characters, got {len(text)}")
    vocabulary = "".join(sorted(set(text)))
    numbers = _encoded(text, vocabulary)
    cut = int((1 - test_share) * len(numbers))
    return CharacterTask(numbers[:cut], numbers[cut:], vocabulary)


def _encoded(text: str, vocabulary: str) -> Tensor:
    positions = {character: i for i, character in enumerate(vocabulary)}
    if unknown := sorted(set(text) - set(positions)):
        raise InputError(f"text must have characters of the vocabulary only, got {', '.join(map(repr, unknown))}")
    return torch.tensor([positions[character] for character in text], dtype=torch.int64)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # line ends are kept
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, eq=False)
class SentenceTask:
    """Sentences and their classes.

    Attributes:
        sentences: Training sentences.
        y: Training classes, integers from 0 to ``classes - 1``, shape ``(n,)``. In SST-2, 0 is negative, 1 positive.
        sentences_test: Test sentences.
        y_test: Test classes, shape ``(n_test,)``.
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
    folder: _PathLike | None = None,
    generator: Seed = None,
) -> SentenceTask:
    r"""Draw sentences of film reviews with their sentiment (SST-2) at random without replacement.

    Each line of the files has a sentence, a tab and a class; there is no header. SST-2 has two classes; files of the
    same format with more classes are supported.

    Args:
        n: Number of training sentences. None uses all. With the same seed, sentences of a smaller n are the first ones
            of a larger n.
        n_test: Number of test sentences. None uses all.
        test: File of the test sentences: ``"test"`` or ``"dev"``.
        folder: Folder of train.tsv, dev.tsv and test.tsv. None is ``text/sst2_sentences`` in the folder of the
            environment variable FEATLEARN_DATA, or else in the folder ``featlearn`` of the user's cache.
        generator: Generator or integer seed of the draw. None is seed 0.

    Returns:
        The task.

    Raises:
        DataNotPresent: A file is missing.
        InputError: A file has another format or fewer sentences.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.datasets import sentence_task
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "train.tsv").write_text("a fine film\t1\na dull film\t0\n")
        >>> _ = (folder / "test.tsv").write_text("fine\t1\n")
        >>> task = sentence_task(folder=folder)
        >>> sorted(zip(task.sentences, task.y.tolist())), task.sentences_test, task.classes
        ([('a dull film', 0), ('a fine film', 1)], ('fine',), 2)
    """
    check_option("test", test, ("test", "dev"))
    where = data_folder(f"text/{_SENTENCES}", folder)
    files = [where / "train.tsv", where / f"{test}.tsv"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise not_present(f"text/{_SENTENCES}", where, missing)
    rows, rows_test = (_sentences(file) for file in files)
    classes = max(number for _, number in rows + rows_test) + 1
    generator = as_generator(generator, "sentences")
    sentences, y = _drawn(rows, n, files[0].name, generator)
    # Test sentences are drawn last: their number does not change the training sentences.
    sentences_test, y_test = _drawn(rows_test, n_test, files[1].name, generator)
    return SentenceTask(sentences, y, sentences_test, y_test, classes)


def _sentences(path: Path) -> list[tuple[str, int]]:
    text = _text(path).replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise InputError(f"{path.name} is empty")
    rows = []
    for i, line in enumerate(text.split("\n")):  # splitlines would split at other characters as well
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
        raise InputError(f"the number of sentences of {name} must be from 0 to {len(rows)}, got {count}")
    kept = [rows[i] for i in torch.randperm(len(rows), generator=generator)[:count].tolist()]
    return tuple(sentence for sentence, _ in kept), torch.tensor([number for _, number in kept], dtype=torch.int64)
