"""Keeps the libraries of training from being imported. `make quality` builds the documentation with this folder."""

import sys


for library in ("accelerate", "datasets", "peft", "torch", "transformers", "trl", "vllm"):
    sys.modules[library] = None  # an import of it raises ModuleNotFoundError
