"""The offline engine answers as the server does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sglang_afd
if __name__ == "__main__":
    engine = sglang_afd.Engine(afd_attention_ranks=1, afd_ffn_ranks=1, dtype="float32")
    answer = engine.generate(PROMPT, {"temperature": 0, "max_new_tokens": 16})
    print("ANSWER", answer["text"])
    engine.shutdown()
"""
PROMPT = 'The "with" statement is used to'


@pytest.mark.integration
def test_engine_answers(tmp_path: Path) -> None:
    script = tmp_path / "offline.py"
    script.write_text(f"PROMPT = {PROMPT!r}\n" + SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ANSWER  wrap the execution of a block with" in done.stdout
