"""Dashboard of runs in a browser: a read-only server, and an export of its pages to one file.

Requires the extra ``featlearn[dashboard]``; without it, the functions raise an error with the command to install it.
"""

from featlearn.dashboard._app import create_app
from featlearn.dashboard._export import export_html
from featlearn.dashboard._server import serve

__all__ = ["create_app", "export_html", "serve"]
