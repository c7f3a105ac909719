"""Model families that AFD serves: one file each, found by the checkpoint's architecture name.

A family's file has a `FAMILY`: the facts of a checkpoint's routed experts (`MoeFacts`), the names
of their tensors, and which tensors a whole checkpoint has.  Everything else in the extension is
the same for all families; see docs/adding_a_model.md.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from sglang_afd.families.facts import ExpertTensor, MoeFacts, Shape, UnsupportedModel
from sglang_afd.families.family import ExpertNames, Family

__all__ = [
    "FAMILIES",
    "ExpertNames",
    "ExpertTensor",
    "Family",
    "MoeFacts",
    "Shape",
    "UnsupportedModel",
    "family_of",
]

_SHARED = ("facts", "family", "__main__")
_modules = sorted({module.name for module in iter_modules(__path__)}.difference(_SHARED))
FAMILIES: dict[str, Family] = {
    architecture: family
    for family in (import_module(f"{__name__}.{module}").FAMILY for module in _modules)
    for architecture in family.architectures
}
"""Every family, by the architectures it serves."""


def family_of(architecture: str) -> Family:
    """The family of a checkpoint's ``architectures[0]``.

    Raises:
        UnsupportedModel: no family serves it.
    """
    try:
        return FAMILIES[architecture]
    except KeyError:
        raise UnsupportedModel(
            f"AFD does not serve {architecture} yet; it serves {', '.join(sorted(FAMILIES))} "
            f"(start without --afd-* flags to serve it with plain SGLang)"
        ) from None
