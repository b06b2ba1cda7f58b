"""Calls a function of a module: `python -m tests.helpers.call MODULE FUNCTION ARGUMENT ...`. Arguments are strings."""

import sys
from importlib import import_module


if __name__ == "__main__":
    module, name, *arguments = sys.argv[1:]
    getattr(import_module(module), name)(*arguments)
