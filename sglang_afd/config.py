"""`AfdConfig`: the one description of a deployment, validated once, carried to child processes.

The launcher builds it from ``--afd-*`` flags, validates it, and exports it as JSON in the
environment variable `ENV` while it starts processes; each child reads it back unchanged.
"""

from __future__ import annotations

import hashlib
import os
import time

import msgspec

from sglang_afd.emulation import Emulation
from sglang_afd.topology import MOST_RANKS, Mode, Role, Topology

ENV = "SGLANG_AFD_CONFIG"
START_BY_ENV = "SGLANG_AFD_START_BY"
"""Reading of ``time.monotonic()``, one clock for all processes of a host, by which the command's
ranks must be ready; set when the command starts."""
TRANSPORTS = ("nvlink", "deepep", "gloo")

MOST_LANES = 4
MOST_ROWS = 1_000_000
"""Rows of one exchange: far more than any buffer holds."""
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 1e6
"""Seconds: what clocks and sockets measure well; the latter is 11 days."""


class ConfigError(ValueError):
    """A deployment description that cannot be right; the message names the flag and the mend."""


class AfdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A deployment: its ranks, how they exchange rows, and the bounds on every wait."""

    attention_ranks: int
    """A: attention DP ranks."""
    ffn_ranks: int
    """F: FFN DP ranks; in CAD mode M: model ranks, which run the experts too."""
    mode: Mode = Mode.AFD
    """Where layers are cut in two."""
    attention_tp: int = 1
    """t: world ranks of every DP rank (attention tensor parallelism)."""
    transport: str = "gloo"
    """How rows travel: one of `TRANSPORTS` (``auto`` is resolved before this is built)."""
    max_tokens_per_rank: int = 128
    """T: rows a rank sends in one exchange of a decode step."""
    prefill_block: int = 4096
    """P: rows a rank sends in one exchange of a prefill, where the transport has blocks."""
    lanes: int = 1
    """Decode batches in flight in turn, each with its own requests."""
    expert_replicas: int = 0
    """Slots for experts beyond one for each, on all FFN ranks together."""
    expert_placement: str = ""
    """File that says which expert each slot holds, or how many rows each got; empty: in order."""
    startup_timeout: float = 600.0
    """Seconds within which every rank must be ready, or the start fails."""
    exchange_timeout: float = 100.0
    """Seconds a rank waits for a peer inside one exchange before it fails."""
    emulated_attention_ranks: int | None = None
    """M: attention DP ranks that are measured, of which the real one is the first; None: as many
    as there are."""
    emulated_ffn_ranks: int | None = None
    """N: likewise for FFN DP ranks."""
    spec_aux_layers: tuple[int, ...] = ()
    """The target's layers, from 0, whose outputs a draft reads that does not name them; empty:
    SGLang's choice."""
    spec_sim_accept: float | None = None
    """Mean tokens of a verify step, whatever the draft gets right; None: what it gets right."""
    spec_sim_seed: int = 0
    """Of the draws that the mean is made of."""
    command_role: Role | None = None
    """The role this command starts (two-command deployments); None: both."""

    def __post_init__(self) -> None:
        _ = self.topology  # raises TopologyError for counts below 1
        self._check_emulation()
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"--afd-transport {self.transport} is unknown; choose auto, {', '.join(TRANSPORTS)}"
            )
        for flag, rows in (
            ("--afd-max-tokens-per-rank", self.max_tokens_per_rank),
            ("--afd-prefill-block", self.prefill_block),
        ):
            if rows < 1:
                raise ConfigError(f"{flag} is {rows}; it must be at least 1")
            if rows > MOST_ROWS:
                raise ConfigError(f"{flag} is {rows}; it must be at most {MOST_ROWS}")
        if not 0 <= self.expert_replicas <= MOST_ROWS:
            raise ConfigError(
                f"--afd-expert-replicas is {self.expert_replicas}; it must be 0 to {MOST_ROWS}"
            )
        if not 1 <= self.lanes <= MOST_LANES:
            raise ConfigError(f"--afd-lanes is {self.lanes}; it must be 1 to {MOST_LANES}")
        for flag, value in (
            ("--afd-startup-timeout", self.startup_timeout),
            ("--afd-exchange-timeout", self.exchange_timeout),
        ):
            if not SHORTEST_WAIT <= value <= LONGEST_WAIT:
                raise ConfigError(
                    f"{flag} is {value}; it must be a number of seconds, {SHORTEST_WAIT:g} to "
                    f"{LONGEST_WAIT:.0f}"
                )

    def _check_emulation(self) -> None:
        for flag, count in (
            ("--afd-emulate-attention-ranks", self.emulated_attention_ranks),
            ("--afd-emulate-ffn-ranks", self.emulated_ffn_ranks),
        ):
            if count is None:
                continue
            if (self.attention_ranks, self.ffn_ranks) != (1, 1):
                raise ConfigError(
                    f"{flag} {count} stands on one attention and one FFN rank, not on "
                    f"{self.attention_ranks} and {self.ffn_ranks}; give --afd-attention-ranks 1 "
                    f"and --afd-ffn-ranks 1"
                )
            if not 2 <= count <= MOST_RANKS:
                raise ConfigError(
                    f"{flag} is {count}; it counts the real rank too and must be 2 to {MOST_RANKS}"
                )

    @property
    def topology(self) -> Topology:
        """The layout of the ranks that there are."""
        return Topology(self.attention_ranks, self.ffn_ranks, self.attention_tp, self.mode)

    @property
    def emulation(self) -> Emulation:
        """What the deployment is measured as; itself, where nothing is emulated."""
        whole = Topology(
            self.emulated_attention_ranks or self.attention_ranks,
            self.emulated_ffn_ranks or self.ffn_ranks,
            self.attention_tp,
            self.mode,
        )
        return Emulation(self.topology, whole)

    def local_ranks(self) -> range:
        """World ranks that this command starts on its machine."""
        if self.command_role is None:
            return range(self.topology.world_size)
        if self.command_role is Role.ATTENTION:
            return self.topology.attention_world
        return self.topology.ffn_world

    def start_by(self) -> float:
        """Reading of ``time.monotonic()`` by which the ranks of this command must be ready."""
        stamped = os.environ.get(START_BY_ENV)
        return float(stamped) if stamped else time.monotonic() + self.startup_timeout

    def agreement(self) -> dict[str, int | float | str | None]:
        """What all ranks of one world must have equal, whichever command started them."""
        fields = msgspec.to_builtins(self)
        fields.pop("command_role")
        fields["spec_aux_layers"] = ",".join(map(str, self.spec_aux_layers))
        return fields

    def to_json(self) -> str:
        """The form that travels to child processes."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> AfdConfig:
        """Inverse of `to_json`.

        Raises:
            ConfigError: the text is not a valid deployment description.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{ENV} does not hold a deployment description: {error}") from error

    @classmethod
    def from_environment(cls) -> AfdConfig | None:
        """The deployment this process belongs to, or None: SGLang runs without AFD."""
        text = os.environ.get(ENV)
        return cls.from_json(text) if text else None


def fingerprint(facts: dict[str, object]) -> int:
    """A 62-bit hash of `facts`, equal on all ranks whose facts are; fits a signed int64."""
    canonical = msgspec.json.encode(facts, order="deterministic")
    return int.from_bytes(hashlib.sha256(canonical).digest()[:8], "big") >> 2


def differences(here: dict[str, object], there: dict[str, object]) -> list[str]:
    """What differs between two descriptions that must be equal, a phrase for each field."""
    return [
        f"{key} is {here.get(key)} here and {there.get(key)} there"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key)
    ]
