"""Command-line interface ``featlearn``."""

import sys

try:
    from featlearn.cli.app import app
except KeyboardInterrupt:  # Ctrl-C before a command handles it
    print("featlearn: stopped. Nothing was written.", file=sys.stderr)
    raise SystemExit(130) from None

__all__ = ["app"]
