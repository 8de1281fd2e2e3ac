"""Trackers: thin adapters that hand a monitor's numbers to TensorBoard, MLflow or Weights & Biases."""

from featlearn.training.trackers.mlflow import MLflowTracker
from featlearn.training.trackers.tensorboard import TensorBoardTracker
from featlearn.training.trackers.tracker import Tracker
from featlearn.training.trackers.wandb import WandbTracker

__all__ = ["MLflowTracker", "TensorBoardTracker", "Tracker", "WandbTracker"]
