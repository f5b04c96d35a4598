"""The shared configuration files of AWS's own tools: `~/.aws/credentials` and `~/.aws/config`.

obstore takes everything from the environment (`AWS_*`, also roles of machines and pods); these files it does not read.

Source: AWS SDKs and Tools reference guide, "Shared config and credentials files".
"""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_ELSEWHERE = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
_NAMES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_VARIABLES = {"region": ("AWS_REGION", "AWS_DEFAULT_REGION"), "endpoint_url": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")}


def shared_settings(env: Mapping[str, str]) -> dict[str, str]:
    """The settings of the chosen profile under obstore's names; the environment overrides them."""
    profile = env.get("AWS_PROFILE", "default")
    values: dict[str, str] = {}
    for name, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(Path(env.get(name, default)).expanduser().read_text(encoding="utf-8"))
            values.update(parser[section])
        except (OSError, KeyError, UnicodeDecodeError, configparser.Error, RuntimeError):
            continue
    chosen: dict[str, str] = {}
    if not any(env.get(name) for name in _ELSEWHERE):
        chosen |= {name: values[key] for key, name in _NAMES.items() if key in values}
    for key, names in _VARIABLES.items():
        if key in values and not any(env.get(name) for name in names):
            chosen[key.removesuffix("_url")] = values[key]
    return chosen
