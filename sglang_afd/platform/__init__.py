"""The reference platform: SGLang on a CPU in plain PyTorch, on any machine, without sgl-kernel."""
