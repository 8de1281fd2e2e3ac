"""Tasks with known structure to learn."""

from featlearn.lab.tasks.chain import (
    RegressionTask,
    chain_monomial,
    chain_monomial_egop,
    chain_monomial_task,
    decaying_covariance,
)

__all__ = [
    "RegressionTask",
    "chain_monomial",
    "chain_monomial_egop",
    "chain_monomial_task",
    "decaying_covariance",
]
