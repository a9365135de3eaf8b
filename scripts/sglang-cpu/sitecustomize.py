"""Python imports this at the start of each process whose PYTHONPATH names this folder: the server and its ranks."""

import torchvision_beside_cpu_torch  # noqa: F401  # imported for its effect
