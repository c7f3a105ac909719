"""Patches for the SGLang that the hooks are written for: what its own users would want, too.

Everything that AFD needs of SGLang is a hook, so nothing here is needed to run this package.  A
patch mends a fault of SGLang's own, for those who serve without AFD; where a hook mends the same,
the hook changes nothing on a patched tree.  ``python -m sglang_afd.patches`` applies the series.
"""
