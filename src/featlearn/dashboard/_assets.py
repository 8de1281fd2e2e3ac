"""What the dashboard needs besides featlearn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from featlearn.errors import InputError

STATIC = Path(__file__).parent / "static"


def require(*packages: str) -> None:
    """Raise unless these packages are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the dashboard needs {', '.join(missing)}: install with `pip install 'featlearn[dashboard]'`, or in a "
            "clone with `pip install -c constraints.txt -e '.[dashboard]'`"
        )


def plotly_script() -> Path:
    """The script that comes with the plotly package: nothing is fetched from elsewhere."""
    require("plotly")
    found = find_spec("plotly")  # importing it would take a second
    places = [] if found is None else list(found.submodule_search_locations or [])
    for place in places:
        script = Path(place) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise InputError("the installed plotly has no plotly.min.js: install it again with `pip install -U plotly`")
