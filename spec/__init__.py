"""Speculative decoding (EAGLE-3) under AFD, imported as `sglang_afd.spec`.

What belongs here is the draft and verify side of a step that is split across roles: the steps that
a speculating attention rank announces to the FFN ranks, and the checks that the accepted tokens are
those of decoding without speculation. SGLang's own speculation classes are reached through
`sglang_afd.upstream`, never named here.
"""
