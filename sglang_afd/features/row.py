"""What a row of the feature table is."""

from __future__ import annotations

from dataclasses import dataclass

TESTS = "tests"
NOT_SHOWN = "not shown to work yet"
LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Switch:
    """A flag of SGLang that turns a feature on.

    flag: its name; aliases: its other names; off: values that leave the feature off; only: if not
    empty, the values that turn it on.
    """

    flag: str
    aliases: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def turned_on_by(self, value: str | None) -> bool:
        """Whether the flag with `value` (None: given without one) turns the feature on."""
        means = None if value is None else _number(value)
        off, only = [*map(_number, self.off)], [*map(_number, self.only)]
        return means not in off and (not only or means in only)


def _number(value: str) -> str | float:
    """A value as SGLang's parser understands it: 1 is ``01`` and ``+1`` too."""
    try:
        return float(value)
    except ValueError:
        return value


@dataclass(frozen=True)
class Feature:
    """A row: a feature, what turns it on, and either the test that shows it or why it is refused.

    requests: endpoints or request fields; environment: variables that turn it on.
    """

    name: str
    switches: tuple[Switch, ...] = ()
    requests: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    test: str = ""
    """Node id of the test that shows the feature; empty: the feature is refused."""
    reason: str = ""
    """Refused: why.  Served: a limit worth knowing, if any."""
    mend: str = ""
    """Refused: what to do instead."""

    @property
    def served(self) -> bool:
        """Whether AFD serves the feature."""
        return bool(self.test)


def flags(*names: str) -> tuple[Switch, ...]:
    """Switches of flags that turn a feature on with any value."""
    return tuple(Switch(name) for name in names)


def served(
    name: str,
    test: str,
    *switches: Switch,
    requests: tuple[str, ...] = (),
    limit: str = "",
) -> Feature:
    """A row of a served feature; `test` is ``FILE::FUNCTION`` under `TESTS`."""
    return Feature(name, switches, requests, test=f"{TESTS}/{test}", reason=limit)


def refused(
    name: str,
    reason: str,
    mend: str,
    *switches: Switch,
    requests: tuple[str, ...] = (),
    environment: tuple[str, ...] = (),
) -> Feature:
    """A row of a refused feature: why, and what to do instead."""
    return Feature(name, switches, requests, environment, reason=reason, mend=mend)
