"""Data sets: tasks with known structure, tables, images and text."""

from typing import TYPE_CHECKING

from featlearn._utils.public_names import lazy_names
from featlearn.errors import DataNotPresent as DataNotPresent

if TYPE_CHECKING:  # type checkers do not read the table below; a test compares the two
    from featlearn.datasets._base import ClassificationTask as ClassificationTask
    from featlearn.datasets._base import RegressionTask as RegressionTask
    from featlearn.datasets._base import data_folder as data_folder
    from featlearn.datasets._base import one_hot_labels as one_hot_labels
    from featlearn.datasets._gaussian_inputs import covariance_with as covariance_with
    from featlearn.datasets._gaussian_inputs import decaying_covariance as decaying_covariance
    from featlearn.datasets._gaussian_inputs import gaussian_task as gaussian_task
    from featlearn.datasets._gaussian_inputs import sphere_task as sphere_task
    from featlearn.datasets._modular_arithmetic import circulant_share as circulant_share
    from featlearn.datasets._modular_arithmetic import modular_task as modular_task
    from featlearn.datasets._parity import ParityTask as ParityTask
    from featlearn.datasets._parity import parity as parity
    from featlearn.datasets._parity import parity_task as parity_task
    from featlearn.datasets._polynomials import SquaredProjections as SquaredProjections
    from featlearn.datasets._polynomials import chain_monomial as chain_monomial
    from featlearn.datasets._polynomials import chain_monomial_egop as chain_monomial_egop
    from featlearn.datasets._polynomials import chain_monomial_task as chain_monomial_task
    from featlearn.datasets._polynomials import high_rank_task as high_rank_task
    from featlearn.datasets._polynomials import polynomial as polynomial
    from featlearn.datasets._polynomials import polynomial_task as polynomial_task
    from featlearn.datasets._teachers import KernelLowerBounds as KernelLowerBounds
    from featlearn.datasets._teachers import LinearMap as LinearMap
    from featlearn.datasets._teachers import LinearTask as LinearTask
    from featlearn.datasets._teachers import Teacher as Teacher
    from featlearn.datasets._teachers import TeacherTask as TeacherTask
    from featlearn.datasets._teachers import linear_task as linear_task
    from featlearn.datasets._teachers import teacher_task as teacher_task
    from featlearn.datasets._text import CharacterTask as CharacterTask
    from featlearn.datasets._text import SentenceTask as SentenceTask
    from featlearn.datasets._text import character_task as character_task
    from featlearn.datasets._text import sentence_task as sentence_task
    from featlearn.datasets.alignment_reversing import ReversingTask as ReversingTask
    from featlearn.datasets.alignment_reversing import reversing_task as reversing_task
    from featlearn.datasets.images import ImageTask as ImageTask
    from featlearn.datasets.images import image_task as image_task
    from featlearn.datasets.tables import read_table as read_table
    from featlearn.datasets.uci import UCITable as UCITable
    from featlearn.datasets.uci import uci_names as uci_names
    from featlearn.datasets.uci import uci_table as uci_table
    from featlearn.datasets.uci import uci_tables as uci_tables

# Public names of each module, imported when first used: a table is read without the code for images and text.
_MODULES = {
    "_base": "ClassificationTask RegressionTask data_folder one_hot_labels",
    "_gaussian_inputs": "covariance_with decaying_covariance gaussian_task sphere_task",
    "_modular_arithmetic": "circulant_share modular_task",
    "_parity": "ParityTask parity parity_task",
    "_polynomials": "SquaredProjections chain_monomial chain_monomial_egop chain_monomial_task high_rank_task "
    "polynomial polynomial_task",
    "_teachers": "KernelLowerBounds LinearMap LinearTask Teacher TeacherTask linear_task teacher_task",
    "_text": "CharacterTask SentenceTask character_task sentence_task",
    "alignment_reversing": "ReversingTask reversing_task",
    "images": "ImageTask image_task",
    "tables": "read_table",
    "uci": "UCITable uci_names uci_table uci_tables",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["DataNotPresent", *_HOMES]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
