"""The attention role: what stands in for the experts on A ranks."""
