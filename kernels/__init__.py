"""Triton and CUDA kernels of AFD, imported as `sglang_afd.kernels`.

Each kernel lies beside its plain PyTorch reference, which defines the result, runs on any device
and is what the kernel's tests compare against. What belongs here knows tensors, streams and devices
only: nothing of SGLang, of roles or of the rest of `sglang_afd`.
"""
