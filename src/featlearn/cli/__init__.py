"""The command ``featlearn``."""

from featlearn.cli.app import app

__all__ = ["app"]
