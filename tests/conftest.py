"""One compute thread and quick compiling for what runs inside the tests themselves; workers set their own."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
