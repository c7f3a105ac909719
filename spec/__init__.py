"""Speculative decoding (EAGLE-3) under AFD, imported as `sglang_afd.spec`.

Attention ranks draft and verify with SGLang's own EAGLE-3 worker; FFN ranks see decode steps that
have several rows a request, and nothing else.  Here is what must be known before anything starts:
whether what the flags ask for can be served (`gate`; `sglang_afd.speculation` reads them), and
whether the draft checkpoint is one that the target can use (`draft`).  SGLang's speculation classes
are reached through `sglang_afd.upstream`, never named here.
"""
