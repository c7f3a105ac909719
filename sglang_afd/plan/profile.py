"""`GpuProfile`: what a GPU can do, each figure with its source; the package ships several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_afd.plan.errors import PlanError, real, whole
from sglang_afd.whole_file import write_whole

SHIPPED = Path(__file__).with_name("profiles")
_SHARES = frozenset(
    {
        "usable",
        "attention_efficiency",
        "gemm_efficiency",
        "grouped_efficiency",
        "math_efficiency",
        "link_efficiency",
    }
)


@dataclass(frozen=True)
class GpuProfile:
    """One GPU and its links.  Bytes, seconds, FLOPs a second; efficiencies are shares of a peak."""

    name: str
    memory: float
    """Device memory, as the driver reports it."""
    usable: float
    """Share of it for weights, KV cache and buffers (SGLang's memory fraction, less graphs)."""
    bandwidth: float
    fp8_flops: float
    """Dense."""
    bf16_flops: float
    link: float
    """To peers, one way."""
    domain: int
    """GPUs that reach each other at `link`."""
    attention_efficiency: float
    """Decode attention: share of `bandwidth`."""
    gemm_efficiency: float
    """Dense GEMMs of a decode step: share of `bandwidth`."""
    grouped_efficiency: float
    """Expert GEMMs: share of `bandwidth`."""
    math_efficiency: float
    """GEMMs: share of the FLOPs."""
    link_efficiency: float
    kernel_seconds: float
    """A small kernel of a CUDA graph, its launch gap included."""
    signal_seconds: float
    """One-sided signal to a peer, one way."""
    collective_seconds: float
    """Dispatch and combine of all ranks' tokens, without bytes: fixed part."""
    collective_peer_seconds: float
    """...and for each rank."""
    eager_layer_seconds: float
    """Host time of a layer without CUDA graphs."""
    measured: bool
    """Whether figures come from such a GPU, or from its datasheet."""
    sources: Mapping[str, str]
    """Where each figure comes from."""


_NUMBERS = [
    field.name
    for field in fields(GpuProfile)
    if field.name not in ("name", "measured", "sources", "domain")
]


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def read_profile(name: str) -> GpuProfile:
    """A profile by its name (`shipped`) or its file.

    Raises:
        PlanError: there is none, or a figure is missing or wrong.
    """
    path = SHIPPED / f"{name.lower()}.json" if name.lower() in shipped() else Path(name)
    if not path.is_file():
        raise PlanError(
            "--gpu",
            f"{name} is neither a file nor one of {', '.join(shipped())}; "
            f"`python -m sglang_afd.plan calibrate` writes a profile of this machine's GPUs",
        )
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError("--gpu", f"{path} cannot be read: {error}") from error
    return profile_of(found)


def profile_of(found: Any) -> GpuProfile:
    """The profile in a file's JSON: ``{"name", "measured", "figures": {field: [value, source]}}``.

    Raises:
        PlanError: a figure is missing, unknown or wrong.
    """
    figures = found.get("figures") if isinstance(found, dict) else None
    if not isinstance(figures, dict):
        raise PlanError("figures", "the profile has none")
    known = {*_NUMBERS, "domain"}
    if unknown := sorted(set(figures) - known):
        raise PlanError(unknown[0], "is no figure of a profile")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field in sorted(known):
        entry = figures.get(field)
        if not isinstance(entry, list) or len(entry) != 2:
            raise PlanError(field, "the profile must give [value, source]")
        value, sources[field] = entry[0], str(entry[1])
        if field == "domain":
            values[field] = whole(field, value, most=4096)
        elif field.endswith("_seconds"):
            values[field] = real(field, value, most=1.0)
        else:
            values[field] = real(field, value, above=0.0, most=1.0 if field in _SHARES else 1e18)
    return GpuProfile(
        name=str(found.get("name") or "gpu"),
        measured=bool(found.get("measured")),
        sources=sources,
        **values,
    )


def write_profile(profile: GpuProfile, path: Path) -> None:
    """Save `profile` in the form that `read_profile` takes."""
    values = asdict(profile)
    figures = {key: [values[key], profile.sources[key]] for key in (*_NUMBERS, "domain")}
    content = {"name": profile.name, "measured": profile.measured, "figures": figures}
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
