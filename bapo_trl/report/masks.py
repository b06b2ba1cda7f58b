"""Pure: settings without the secrets in them, known by their names and by their shapes."""

import json
import re
from collections.abc import Mapping
from typing import Any


_SECRET_NAME = re.compile(
    r"secret|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!stop_)(?<!image_)(?<!mask_)token$"
    r"|(?:passw(?:or)?d|pwd|passphrase|[_-]key|apikey|credentials?|authorization|auth|cookie)$",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"(?<=://)[^/?#\s\"']+(?=@)"  # the name and the password before a host
    r"|\b(?:hf|api_org)_[A-Za-z0-9]{16,}"
    r"|\b(?:gh[a-z]|github_pat|glpat|sk|xox[a-z])[_-][\w-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?<=[?&]key=)[^&#\s\"']+|(?<=[?&]sig=)[^&#\s\"']+"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]*"  # JSON web tokens
    r"|(?<=\bbearer )[\w.~+/-]{16,}=*|(?<=\bbasic )[\w+/-]{16,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*-----)?",
    re.IGNORECASE,
)
# token=..., "api_key": "...": the name, then its value
_NAMED = re.compile(
    r"((?:secret|token|passw(?:or)?d|(?:api|access)[_-]?key)(?:=|[\"']\s*:\s*)[\"']?)"
    r"(?!none|null|true|false)[^\s\"'&,;}]+",
    re.IGNORECASE,
)
_MASK = "<SECRET>"


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return settings as JSON holds them, with what looks like a secret masked at any depth.

    A value is secret if its name says so (`token`, `api_key`, `password`, ...). In other text, credentials in a URL
    are, and what has the form of a token. What JSON does not know becomes text.

    Example:

    ```python
    >>> without_secrets({"seed": 1, "load": {"token": "abc"}, "server": "http://me:abc@host:8000"})
    {'seed': 1, 'load': {'token': '<TOKEN>'}, 'server': 'http://<SECRET>@host:8000'}

    ```
    """
    return _masked(json.loads(json.dumps(settings, default=str)))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: f"<{name.upper()}>" if _is_secret(name, part) else _masked(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_masked(part) for part in value]
    return _NAMED.sub(rf"\1{_MASK}", _SHAPES.sub(_MASK, value)) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    """Whether a value is to be masked: `True` for a token says only where it is, and nothing hides nothing."""
    return _SECRET_NAME.search(name) is not None and not isinstance(value, bool) and value not in (None, "")
