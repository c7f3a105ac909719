"""Configurations: what a benchmark runs, a small YAML or JSON file each.

A file's name is the configuration's.  A file with ``ratios`` stands for one configuration a ratio,
``NAME-3to1`` and so on: its AFD systems then have that many times their FFN ranks in attention
ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

FOLDER = Path(__file__).parent / "configurations"
KINDS = ("decode", "transport", "experts", "serving", "memory", "spec", "cad", "variants")
"""All that ``list --kind`` takes; spec and cad have no configuration yet."""
_SUFFIXES = (".yaml", ".yml", ".json")


class BadConfiguration(ValueError):
    """A file that cannot be right; the message names it, the key and what is wrong."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A part of a file; an unknown or missing key makes it unreadable."""


class _System(_Strict, kw_only=True, frozen=True):
    """A server to measure."""

    batch: int | None = None
    """Requests on each attention DP rank, where it is not the configuration's."""
    graphs: bool = True
    """Whether decode steps must be replayed from CUDA graphs."""
    overrides: dict[str, Any] = {}
    """Fields of the model's config.json that this system alone has otherwise."""
    args: list[str] = []
    """More flags of this server."""
    environment: dict[str, str] = {}
    """Environment variables of this server alone."""


class Afd(_System, kw_only=True, frozen=True, tag_field="layout", tag="afd"):
    """A deployment of attention and FFN ranks."""

    attention_ranks: int = 1
    ffn_ranks: int = 1
    attention_tp: int = 1
    lanes: int = 1
    transport: str = "auto"
    emulated_attention_ranks: int | None = None
    """M: the one attention rank stands for rank 0 of so many."""
    emulated_ffn_ranks: int | None = None
    """N: the one FFN rank stands for rank 0 of so many."""

    @property
    def emulated(self) -> bool:
        """Whether ranks are stood in for; the answers then are not the model's."""
        return self.emulated_attention_ranks is not None or self.emulated_ffn_ranks is not None

    @property
    def ranks(self) -> int:
        """Attention DP ranks that take requests."""
        return self.attention_ranks

    @property
    def counted_ranks(self) -> int:
        """Attention DP ranks whose requests count, the emulated ones among them."""
        return self.emulated_attention_ranks or self.attention_ranks

    @property
    def gpus(self) -> int:
        """GPUs that the figures are shared by, those of emulated ranks among them."""
        return (self.counted_ranks + (self.emulated_ffn_ranks or self.ffn_ranks)) * (
            self.attention_tp
        )


class Colocated(_System, kw_only=True, frozen=True, tag_field="layout", tag="colocated"):
    """SGLang without AFD."""

    gpus: int = 1
    """Tensor-parallel world."""
    attention_dp: int = 1
    """Attention DP ranks, over which requests are dealt; 1: attention is tensor-parallel."""
    expert_parallel: int = 1
    exchange: Literal["none", "deepep", "megamoe"] = "none"
    """SGLang's --moe-a2a-backend."""
    lanes: Literal[1] = 1

    emulated = False

    @property
    def ranks(self) -> int:
        """Attention DP ranks."""
        return self.attention_dp

    @property
    def counted_ranks(self) -> int:
        """Attention DP ranks whose requests count."""
        return self.attention_dp


System = Afd | Colocated


class _Any(_Strict, kw_only=True, frozen=True):
    """What all kinds have."""

    regime: str
    """In words: what is measured, and which case it is for AFD, good or bad."""
    seed: int = 20261130
    rounds: int = 2
    """How often the systems take turns: A B A B for two."""
    reference: str | None = None
    """A record under benchmarks/results whose step times this one must repeat within 3 %."""

    def compared(self) -> dict[str, System]:
        """The servers that take turns."""
        return {}


class _Served(_Any, kw_only=True, frozen=True):
    """What measures servers."""

    model: str
    """A name in sglang_afd/plan/models (its shape with dummy weights), ``embedded``, or the path of
    a checkpoint."""
    dtype: str = "auto"
    overrides: dict[str, Any] = {}
    """Fields of the model's config.json that all systems have otherwise: fewer layers, say."""
    args: list[str] = []
    """More flags of every server."""
    start_seconds: float = 600
    """In which a server must be healthy."""
    systems: dict[str, System]
    baseline: str
    """The system that the others are compared with."""
    ratios: list[str] = []
    """Attention ranks for every FFN rank, ``3:1`` for example; see the module's docstring."""

    def compared(self) -> dict[str, System]:
        """The servers that take turns, the baseline first."""
        first = {self.baseline: self.systems[self.baseline]}
        return {**first, **self.systems}


class _Steps(_Served, kw_only=True, frozen=True):
    """Steady decode."""

    context: int
    """Tokens of every prompt."""
    batch: int
    """Requests on each attention DP rank."""
    steps: int = 15
    warm_up: int = 5
    """Steps at the full batch that come before the counted ones."""
    output: int | None = None
    """Tokens of every answer; None: enough, see `benchmarks.decode`."""
    answer_seconds: float = 600
    resident: bool = False
    """All systems start at once, and each makes its prompts' KV once: they must fit the GPUs
    together.  Turns then take seconds."""
    profiled_steps: int = 0
    """Steps of which a profile is taken in the last turn of every system, to tell what its GPUs
    did; not among the counted ones."""


class Decode(_Steps, kw_only=True, frozen=True, tag_field="kind", tag="decode"):
    """Systems at a steady decode."""


class Variants(_Steps, kw_only=True, frozen=True, tag_field="kind", tag="variants"):
    """One deployment with one thing changed."""


class Serving(_Served, kw_only=True, frozen=True, tag_field="kind", tag="serving"):
    """Systems under sglang.bench_serving's random ids."""

    input: int
    output: int
    requests: int
    concurrency: int
    answer_seconds: float = 600


class _Script(_Any, kw_only=True, frozen=True):
    """What a script of this package measures by itself."""

    rounds: int = 1
    args: list[str] = []
    gpus: int
    """GPUs that it needs."""
    seconds: float = 600


class Transport(_Script, kw_only=True, frozen=True, tag_field="kind", tag="transport"):
    """Exchanges without experts."""

    script: Literal["transport"]


class Experts(_Script, kw_only=True, frozen=True, tag_field="kind", tag="experts"):
    """MoE layers."""

    script: Literal["prefill"]


class Memory(_Script, kw_only=True, frozen=True, tag_field="kind", tag="memory"):
    """What ranks hold."""

    script: Literal["deepep_memory", "two_gpus"]


Steps = Decode | Variants
Script = Transport | Experts | Memory
Configuration = Decode | Variants | Serving | Transport | Experts | Memory


def kind_of(configuration: Configuration) -> str:
    """One of `KINDS`."""
    return str(type(configuration).__struct_config__.tag)


def load_all(folder: Path = FOLDER) -> dict[str, Configuration]:
    """Every configuration by its name.

    Raises:
        BadConfiguration: a file cannot be right, or two have the same name.
    """
    found: dict[str, Configuration] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix not in _SUFFIXES:
            continue
        for name, configuration in load(file).items():
            if name in found:
                raise BadConfiguration(f"{file}: there is another configuration {name}")
            found[name] = configuration
    return found


def load(file: Path) -> dict[str, Configuration]:
    """The configurations of one file: one, or one for each of its ratios.

    Raises:
        BadConfiguration: it cannot be right.
    """
    try:
        decode = msgspec.json.decode if file.suffix == ".json" else msgspec.yaml.decode
        configuration = decode(file.read_bytes(), type=Configuration)
        _check(configuration)
        ratios = getattr(configuration, "ratios", [])
        if not ratios:
            return {file.stem: configuration}
        return {
            f"{file.stem}-{ratio.replace(':', 'to')}": _at_ratio(configuration, ratio)
            for ratio in ratios
        }
    except OSError as error:
        raise BadConfiguration(f"{file} cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, BadConfiguration) as error:
        raise BadConfiguration(f"{file}: {error}") from error


def _check(configuration: Configuration) -> None:
    """What the types do not say.

    Raises:
        BadConfiguration: a value cannot be right.
    """
    _at_least(configuration, 1, "rounds")
    if isinstance(configuration, Script):
        _at_least(configuration, 1, "gpus", "seconds")
        return
    for name, system in configuration.systems.items():
        _check_system(f"systems.{name}", system, configuration)
    if configuration.baseline not in configuration.systems:
        raise BadConfiguration(f"baseline: {configuration.baseline} is none of the systems")
    _at_least(configuration, 1, "start_seconds", "answer_seconds")
    if isinstance(configuration, Serving):
        _at_least(configuration, 1, "input", "output", "requests", "concurrency")
        return
    _at_least(configuration, 1, "context", "batch", "steps")
    _at_least(configuration, 0, "warm_up")
    if configuration.output is not None and configuration.output < (
        configuration.warm_up + configuration.steps + 2
    ):
        raise BadConfiguration("output: answers must outlast warm_up and steps by two tokens")


def _check_system(where: str, system: System, configuration: _Served) -> None:
    if isinstance(system, Afd):
        _at_least(system, 1, "attention_ranks", "ffn_ranks", "attention_tp", "lanes", where=where)
        if system.emulated and (system.attention_ranks, system.ffn_ranks) != (1, 1):
            raise BadConfiguration(f"{where}: emulation stands on one attention and one FFN rank")
        if system.emulated and isinstance(configuration, Serving):
            raise BadConfiguration(f"{where}: emulated ranks decode and do not prefill: no serving")
        for key in ("emulated_attention_ranks", "emulated_ffn_ranks"):
            if getattr(system, key) is not None:  # the real rank counts too
                _at_least(system, 2, key, where=where)
    else:
        _at_least(system, 1, "gpus", "attention_dp", "expert_parallel", where=where)
        if system.gpus % system.attention_dp or system.gpus % system.expert_parallel:
            raise BadConfiguration(
                f"{where}: attention_dp and expert_parallel must divide the {system.gpus} gpus"
            )
    batch = system.batch if system.batch is not None else getattr(configuration, "batch", None)
    if batch is not None and (batch < 1 or batch % system.lanes):
        raise BadConfiguration(f"{where}.batch: {batch} does not divide into {system.lanes} lanes")


def _at_least(part: Any, least: int, *keys: str, where: str = "") -> None:
    for key in keys:
        if getattr(part, key) < least:
            place = f"{where}.{key}" if where else key
            raise BadConfiguration(f"{place}: {getattr(part, key)} is less than {least}")


def _at_ratio(configuration: Any, ratio: str) -> Configuration:
    parts = ratio.split(":")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise BadConfiguration(f"ratios: {ratio} is no A:F such as 3:1")
    attention, ffn = map(int, parts)
    systems: dict[str, System] = {}
    for name, system in configuration.systems.items():
        if isinstance(system, Afd):
            if system.ffn_ranks * attention % ffn:
                raise BadConfiguration(f"ratios: {ratio} of {system.ffn_ranks} FFN ranks is uneven")
            ranks = system.ffn_ranks * attention // ffn
            system = msgspec.structs.replace(system, attention_ranks=ranks)
        systems[name] = system
    return msgspec.structs.replace(configuration, systems=systems, ratios=[])
