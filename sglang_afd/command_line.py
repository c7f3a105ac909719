"""Reading SGLang's flags off a command line, without SGLang's own parser (seconds to import)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_afd.config import ConfigError

WHOLE_FLAGS = frozenset(
    {
        "--disable-cuda-graph",
        "--dllm-algorithm",
        "--enable-dp-attention",
        "--enable-linear-replayssm",
        "--enable-lora",
        "--enable-metrics",
        "--enable-torch-compile",
        "--ep",
        "--export-metrics-to-file",
        "--hicache-storage-backend",
        "--kv-canary",
        "--log-level",
        "--log-requests",
        "--model",
        "--prefill-decode-interval",
        "--quantization",
        "--radix-eviction-policy",
        "--sidecar",
        "--speculative-adaptive",
        "--speculative-draft-model",
        "--ssl-keyfile",
    }
)
"""SGLang's flags that other flags begin with; every other beginning of a flag abbreviates it."""


_OFF = ("", "0", "false", "no", "off", "n", "f")


def is_on(variable: str | None) -> bool:
    """Whether SGLang reads the value of an environment variable (None: unset) as true."""
    return (variable or "").lower() not in _OFF


def values(args: Sequence[str], *spellings: str) -> list[str | None]:
    """Every value that `args` give a flag, in order; None where it stands without a value.

    Args:
        spellings: the flag's names, each with its dashes.  ``--flag=value`` and abbreviations
            count too, as they do for SGLang's parser.
    """
    found: list[str | None] = []
    for index, arg in enumerate(args):
        if not arg.startswith("--"):
            continue
        name, equals, value = arg.partition("=")
        if not any(means(name, spelling) for spelling in spellings):
            continue
        if equals:
            found.append(value)
        elif index + 1 < len(args) and not args[index + 1].startswith("--"):
            found.append(args[index + 1])
        else:
            found.append(None)
    return found


def last_value(args: Sequence[str], *spellings: str) -> str | None:
    """The value that counts: the last one, or None if the flag is not given with a value."""
    return (values(args, *spellings) or [None])[-1]


def int_value(args: Sequence[str], *spellings: str, default: int) -> int:
    """The last value as an integer.

    Raises:
        ConfigError: it is none.
    """
    text = last_value(args, *spellings)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{spellings[0]} is {text!r}; it must be an integer") from None


def int_list(args: Sequence[str], spelling: str) -> list[int]:
    """The integers that follow the flag's last mention; none if it is not given.

    Raises:
        ConfigError: one of them is no integer.
    """
    found: list[str] = []
    reading = False
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            reading = means(name, spelling)
            if reading:
                found = [value] if equals else []
        elif reading:
            found.append(arg)
    try:
        return [int(text) for text in found]
    except ValueError:
        raise ConfigError(f"{spelling} is {' '.join(found)!r}; it must be integers") from None


def expand_config_file(args: Sequence[str]) -> list[str]:
    """Replace ``--config FILE`` by the options in that YAML file, as SGLang does.

    They come first, so that the command line's own flags count.  Keys are flags without dashes,
    ``afd-`` ones included.

    Raises:
        ConfigError: the file is missing or is no YAML mapping, or there are two.
    """
    rest: list[str] = []
    files: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        if arg == "--config":
            files.append(next(remaining, ""))
        elif arg.startswith("--config="):
            files.append(arg.partition("=")[2])
        else:
            rest.append(arg)
    if not files:
        return list(args)
    if len(files) > 1:
        raise ConfigError("--config is given twice; put the options into one file")
    options = _read_yaml(files[0])
    return [part for key, value in options.items() for part in as_flag(key, value)] + rest


def means(name: str, spelling: str) -> bool:
    """Whether SGLang's parser takes `name` for the flag `spelling`: it may be abbreviated."""
    if name == spelling:
        return True
    return len(name) > 2 and name not in WHOLE_FLAGS and spelling.startswith(name)


def _read_yaml(file: str) -> dict[str, Any]:
    import yaml

    try:
        options = yaml.safe_load(Path(file).read_text())
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:  # no text, no path, a date that is none
        raise ConfigError(f"--config {file} is no YAML: {error}") from error
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ConfigError(f"--config {file} must hold a mapping of flags to values")
    return options


def as_flag(key: str, value: Any) -> list[str]:
    """A named value as command-line arguments.

    True is a switch; False and an empty sequence are left out; a sequence is several values, and a
    dictionary is JSON.
    """
    flag = "--" + str(key).replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)] if value else []
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
