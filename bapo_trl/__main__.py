"""`python -m bapo_trl` is `bapo-trl`: for `accelerate launch -m bapo_trl train ...`."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
