"""Tasks with known structure to learn."""

from featlearn.lab.tasks.chain import chain_monomial, chain_monomial_egop, chain_monomial_task
from featlearn.lab.tasks.folders import DataNotPresent, data_folder
from featlearn.lab.tasks.gaussian import covariance_with, decaying_covariance, gaussian_task, sphere_task
from featlearn.lab.tasks.images import ImageTask, image_task
from featlearn.lab.tasks.linear import LinearMap, LinearTask, linear_task
from featlearn.lab.tasks.modular import circulant_share, modular_task
from featlearn.lab.tasks.parity import ParityTask, parity, parity_task
from featlearn.lab.tasks.polynomials import SquaredProjections, high_rank_task, polynomial, polynomial_task
from featlearn.lab.tasks.reversing import ReversingTask, reversing_task
from featlearn.lab.tasks.tables import read_table
from featlearn.lab.tasks.task import ClassificationTask, RegressionTask, one_hot_labels
from featlearn.lab.tasks.teachers import KernelLowerBounds, Teacher, TeacherTask, teacher_task
from featlearn.lab.tasks.text import CharacterTask, SentenceTask, character_task, sentence_task
from featlearn.lab.tasks.uci import UCITable, uci_names, uci_table, uci_tables

__all__ = [
    "CharacterTask",
    "ClassificationTask",
    "DataNotPresent",
    "ImageTask",
    "KernelLowerBounds",
    "LinearMap",
    "LinearTask",
    "ParityTask",
    "RegressionTask",
    "ReversingTask",
    "SentenceTask",
    "SquaredProjections",
    "Teacher",
    "TeacherTask",
    "UCITable",
    "chain_monomial",
    "chain_monomial_egop",
    "chain_monomial_task",
    "character_task",
    "circulant_share",
    "covariance_with",
    "data_folder",
    "decaying_covariance",
    "gaussian_task",
    "high_rank_task",
    "image_task",
    "linear_task",
    "modular_task",
    "one_hot_labels",
    "parity",
    "parity_task",
    "polynomial",
    "polynomial_task",
    "read_table",
    "reversing_task",
    "sentence_task",
    "sphere_task",
    "teacher_task",
    "uci_names",
    "uci_table",
    "uci_tables",
]
