"""What a validation is told to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_afd.validate.prompts import PromptSet
from sglang_afd.validation.thresholds import Thresholds


@dataclass(frozen=True)
class Settings:
    """One validation, resolved: nothing in it is left to a default."""

    candidate_args: tuple[str, ...]
    """Arguments of ``launch_server``: the deployment, and everything of SGLang's."""
    layout: str
    """In words, for people."""
    model: Path
    reference: str
    """``hf``, ``sglang`` or a server's address."""
    reference_model: Path
    reference_args: tuple[str, ...]
    """Arguments of SGLang's server; of the reference sglang alone."""
    reference_python: str
    """The interpreter that runs the reference."""
    prompts: PromptSet
    seed: int
    new_tokens: int
    record: tuple[int, ...]
    """Numbers of the prompts whose MoE layers are recorded."""
    thresholds: Thresholds
    dtype: str
    """The candidate's --dtype: ``float32``, ``bfloat16`` or ``auto``."""
    on_cpu: bool
    replayed: bool
    """Whether the candidate's decode steps are replayed from CUDA graphs, which record no row."""
    start_timeout: float
    """Seconds in which a side must be ready."""
    answer_timeout: float
    """Seconds in which one request must be answered."""
    work: Path
    """A folder for logs and recordings."""

    @property
    def by_url(self) -> bool:
        """Whether the reference is a running server."""
        return self.reference not in ("hf", "sglang")

    def recorded_rows(self, length: int, made: int) -> int:
        """Rows, from the first one on, that both sides record of a prompt.

        Args:
            length: the prompt's tokens.
            made: tokens that both sides made alike. Reading them makes the rows of decode steps.
        """
        return length if self.replayed else length + made

    def recordings(self, side: str) -> Path:
        """The folder of a side's recordings."""
        folder = self.work / f"recorded-{side}"
        folder.mkdir(exist_ok=True)
        return folder
