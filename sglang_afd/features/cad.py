"""Which rows of the feature table go with ``--afd-mode cad``; the gate refuses the flags of others.

Rows without flags are requests' and the HTTP server's: they end in the scheduler, which is SGLang's
own in either mode.
"""

from __future__ import annotations

_FEATURES = "tests/integration/test_features.py::"

SERVED_IN_CAD: dict[str, str] = {
    # a row's name -> the test that shows it in CAD mode
    "Chunked prefill": _FEATURES + "test_chunked_prefill",
    "Priority scheduling": _FEATURES + "test_priority_scheduling",
    "Structured output (xgrammar)": _FEATURES + "test_structured_output",
    "Metrics": "tests/integration/test_cad.py::test_metrics_of_both_roles",
}
