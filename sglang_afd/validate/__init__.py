"""Whether a deployment gives the model's answers: compared with a reference, token by token.

``python -m sglang_afd.validate --help`` tells how; docs/validating.md explains the report.
"""
