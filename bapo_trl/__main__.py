"""Run `bapo-trl` as a module, as in `accelerate launch -m bapo_trl train ...`."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
