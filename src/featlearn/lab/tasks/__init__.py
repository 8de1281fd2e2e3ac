"""Tasks with known structure to learn."""

from featlearn.lab.tasks.chain import chain_monomial, chain_monomial_egop, chain_monomial_task, decaying_covariance
from featlearn.lab.tasks.folders import DataNotPresent, data_folder
from featlearn.lab.tasks.images import ImageTask, image_task
from featlearn.lab.tasks.modular import circulant_share, modular_task
from featlearn.lab.tasks.parity import ParityTask, parity, parity_task
from featlearn.lab.tasks.tables import read_table
from featlearn.lab.tasks.task import ClassificationTask, RegressionTask, one_hot_labels
from featlearn.lab.tasks.teachers import KernelLowerBounds, Teacher, TeacherTask, teacher_task
from featlearn.lab.tasks.uci import UCITable, uci_names, uci_table, uci_tables

__all__ = [
    "ClassificationTask",
    "DataNotPresent",
    "ImageTask",
    "KernelLowerBounds",
    "ParityTask",
    "RegressionTask",
    "Teacher",
    "TeacherTask",
    "UCITable",
    "chain_monomial",
    "chain_monomial_egop",
    "chain_monomial_task",
    "circulant_share",
    "data_folder",
    "decaying_covariance",
    "image_task",
    "modular_task",
    "one_hot_labels",
    "parity",
    "parity_task",
    "read_table",
    "teacher_task",
    "uci_names",
    "uci_table",
    "uci_tables",
]
