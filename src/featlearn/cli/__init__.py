"""The command ``featlearn``."""

import sys

try:
    from featlearn.cli.app import app
except KeyboardInterrupt:  # Ctrl-C before there is a command that could say so
    print("featlearn: stopped. Nothing was written.", file=sys.stderr)
    raise SystemExit(130) from None

__all__ = ["app"]
