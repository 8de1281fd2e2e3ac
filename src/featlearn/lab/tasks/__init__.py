"""Tasks with known structure to learn."""

from featlearn.lab.tasks.chain import chain_monomial, chain_monomial_egop, chain_monomial_task, decaying_covariance
from featlearn.lab.tasks.task import RegressionTask
from featlearn.lab.tasks.teachers import KernelLowerBounds, Teacher, TeacherTask, teacher_task

__all__ = [
    "KernelLowerBounds",
    "RegressionTask",
    "Teacher",
    "TeacherTask",
    "chain_monomial",
    "chain_monomial_egop",
    "chain_monomial_task",
    "decaying_covariance",
    "teacher_task",
]
