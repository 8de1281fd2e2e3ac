"""Runs in a browser, on this machine: a server that only reads, and the same pages as one file.

Needs the extra ``featlearn[dashboard]``, and says so when it is used without.
"""

from featlearn.dashboard._app import create_app
from featlearn.dashboard._export import export_html
from featlearn.dashboard._server import serve

__all__ = ["create_app", "export_html", "serve"]
