"""``python -m featlearn``, the same as the command ``featlearn``."""

from featlearn.cli import app

if __name__ == "__main__":
    app(prog_name="featlearn")
