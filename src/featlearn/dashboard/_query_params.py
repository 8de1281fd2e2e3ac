"""What a request asks for, checked: every value has a limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from featlearn.errors import InputError

if TYPE_CHECKING:
    from starlette.requests import Request

_LONGEST = 500
LAST_STEP = 2**63 - 1


def check_params(request: Request, *names: str) -> Mapping[str, str]:
    """The values of a request, which may have these names."""
    for name in request.query_params:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise InputError(f"{name[:60]!r} is not a parameter here: there are {listed}")
    return request.query_params


def text_param(values: Mapping[str, str], name: str, *, needed: bool = False) -> str | None:
    """A text of a sane length, or None."""
    value = values.get(name)
    if value is None:
        if needed:
            raise InputError(f"{name} is missing: add ?{name}=...")
        return None
    if len(value) > _LONGEST or "\0" in value:
        raise InputError(f"{name} must be a text of at most {_LONGEST} letters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} must be text that can be written as UTF-8") from None
    return value


def int_param(values: Mapping[str, str], name: str, least: int, most: int, default: int | None) -> int | None:
    """An integer within limits, or the default."""
    value = values.get(name)
    if value is None or value == "":
        return default
    if not re.fullmatch(r"[0-9]{1,19}", value) or not least <= int(value) <= most:
        raise InputError(f"{name} must be an integer from {least} to {most}, got {value[:40]!r}")
    return int(value)


def step_param(value: str, name: str = "step") -> int:
    """A step."""
    found = int_param({name: value}, name, 0, LAST_STEP, None)
    if found is None:
        raise InputError(f"{name} is missing")
    return found


def ids_param(values: Mapping[str, str], name: str) -> list[str]:
    """Identifiers of runs with commas between them."""
    text = text_param(values, name, needed=True) or ""
    found = [part for part in text.split(",") if part]
    if any(not re.fullmatch(r"[0-9a-f]{12}", part) for part in found):
        raise InputError(f"{name} must be identifiers of runs, with commas between them")
    return found
