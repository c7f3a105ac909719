"""Settings that must be made before the first use of a GPU in this process."""

from __future__ import annotations

import os

# Streams that wait for one another must not share one of the device's launch queues (8 by default).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Loading a kernel waits for the device; where all ranks are one process, what it waits for may come
# only after it.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
