"""Core-attention disaggregation (``--afd-mode cad``): the KV cache and attention on ranks of their
own, everything else of a layer on model ranks.  See docs/cad.md."""
