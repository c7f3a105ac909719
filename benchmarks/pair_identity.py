"""What an endpoint serves, as it says itself, and whether two of them may be ranked."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sglang_afd.identity import checkpoint_content
from sglang_afd.validation import report

FIELDS = ("checkpoint", "dtype", "gpus", "transport", "stage", "graph", "quantisation")
"""What must be equal on both sides."""
_LAYOUT = ("attention_ranks", "ffn_ranks", "attention_tp", "transport")


class Endpoint(Protocol):
    """A server that is running."""

    url: str

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300) -> Any:
        """GET `path`, or POST `body` to it; the decoded JSON answer."""


class Side(msgspec.Struct, kw_only=True):
    """One endpoint, as it says itself."""

    identity: dict[str, Any]
    """`FIELDS`; None: it does not say."""
    layout: dict[str, Any] | None
    """AFD's ranks and transport; None: no AFD."""
    emulated: bool = False
    """AFD with ranks that are stood in for."""


def ask(endpoint: Endpoint) -> Side:
    """What an endpoint's ``/server_info`` says; nothing where it has none."""
    try:
        info = endpoint.call("/server_info", timeout=60)
    except (OSError, ValueError, http.client.HTTPException):
        return Side(identity=dict.fromkeys(FIELDS), layout=None)
    told = (info.get("internal_states") or [{}])[0].get("afd") or {}
    afd = told.get("config")
    return Side(
        identity={
            "checkpoint": _checkpoint(info),
            "dtype": f"{info.get('dtype')}, KV cache {info.get('kv_cache_dtype')}",
            "gpus": _world(info),
            # an endpoint without AFD has no transport that could differ
            "transport": afd["transport"] if afd else None,
            "stage": info.get("disaggregation_mode") or "null",
            "graph": info.get("cuda_graph_backend_decode") or "default",
            "quantisation": info.get("quantization") or "as the checkpoint",
        },
        layout={name: afd.get(name) for name in _LAYOUT} if afd else None,
        emulated=bool(told.get("emulated")),
    )


def _world(info: dict[str, Any]) -> int | None:
    """GPUs of the deployment; replicas (dp without attention DP) are GPUs of their own."""
    if "tp_size" not in info:
        return None
    replicas = 1 if info.get("enable_dp_attention") else int(info.get("dp_size") or 1)
    return int(info["tp_size"]) * int(info.get("pp_size") or 1) * replicas


def _checkpoint(info: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint's content where it is on this machine, else what it is called."""
    path = info.get("model_path")
    if not isinstance(path, str):
        return None
    place = Path(path)
    name = place.name if place.is_absolute() else path
    content = checkpoint_content(place) if place.is_dir() else {"name": name}
    return {
        **content,
        "load_format": info.get("load_format"),
        "overrides": info.get("json_model_override_args"),
        "revision": info.get("revision"),
    }


def not_comparable(baseline: Side, candidate: Side, gpus: int) -> list[str]:
    """Why the two must not be ranked; empty: they may be.

    Args:
        gpus: that each side is said to take.
    """
    reasons = []
    for field in FIELDS:
        one, other = baseline.identity[field], candidate.identity[field]
        if field == "transport":
            if one is not None and other is not None and one != other:
                reasons.append(f"transport differs: {one} and {other}")
        elif one is None or other is None:
            who = " and ".join(
                name for name, value in (("baseline", one), ("candidate", other)) if value is None
            )
            reasons.append(f"{field} is not known: the {who} does not say it in /server_info")
        elif one != other:
            reasons.append(f"{field} differs: {_differing(one, other)}")
    for name, side in (("baseline", baseline), ("candidate", candidate)):
        if side.emulated:
            reasons.append(f"the {name} emulates ranks: its answers are not the model's")
        found = side.identity["gpus"]
        if found is not None and found != gpus:
            reasons.append(f"the {name} says it has {found} GPUs, --gpus says {gpus}")
    return reasons


def _differing(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        return ", ".join(key for key in {**one, **other} if one.get(key) != other.get(key))
    return f"{one} and {other}"


def not_validated(file: Path | None, candidate: Side) -> list[str]:
    """Why no passing validation of the candidate is given; empty: one is."""
    if file is None:
        return ["no validation report is given (--validation)"]
    try:
        found = report.read(file)
    except report.BadReport as error:
        return [str(error).replace(str(file), file.name)]
    return [*report.shortcomings(found), *_other_candidate(found.candidate, candidate)]


def _other_candidate(validated: report.Identity, candidate: Side) -> Sequence[str]:
    """Whether another deployment than `candidate` was validated."""
    known = candidate.identity["checkpoint"] or {}
    own = {name: value for name, value in known.items() if name in validated.checkpoint}
    reasons = []
    if not validated.checkpoint or own != validated.checkpoint:
        reasons.append("the validation is of another checkpoint than the candidate's")
    arguments = validated.configuration.get("arguments") or {}
    dtype = f"{arguments.get('dtype')}, KV cache {arguments.get('kv_cache_dtype')}"
    if dtype != candidate.identity["dtype"]:
        reasons.append(f"the validation is of dtype {dtype}, not {candidate.identity['dtype']}")
    says = validated.configuration.get("afd")
    config = says.get("config") if isinstance(says, dict) else None
    layout = {name: config.get(name) for name in _LAYOUT} if config else None
    if layout != candidate.layout:
        reasons.append(f"the validation is of layout {layout}, the candidate is {candidate.layout}")
    return reasons
