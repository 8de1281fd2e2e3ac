"""Tasks with known structure to learn."""

from featlearn.lab.tasks.chain import chain_monomial, chain_monomial_egop, chain_monomial_task, decaying_covariance
from featlearn.lab.tasks.modular import circulant_share, modular_task
from featlearn.lab.tasks.parity import ParityTask, parity, parity_task
from featlearn.lab.tasks.tables import read_table
from featlearn.lab.tasks.task import ClassificationTask, RegressionTask
from featlearn.lab.tasks.teachers import KernelLowerBounds, Teacher, TeacherTask, teacher_task
from featlearn.lab.tasks.uci import UCITable, uci_names, uci_table, uci_tables

__all__ = [
    "ClassificationTask",
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
    "decaying_covariance",
    "modular_task",
    "parity",
    "parity_task",
    "read_table",
    "teacher_task",
    "uci_names",
    "uci_table",
    "uci_tables",
]
