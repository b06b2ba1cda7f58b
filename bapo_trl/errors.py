"""What a user gave and can mend, as an error of its own: the command line ends with its one sentence."""

import argparse
from typing import NoReturn


class InputError(ValueError):
    """
    A setting, a file, a data set, a reward or a package that cannot be used. The message names it and the fix.

    Everything else that is raised is a bug, or an error of the user's own code, and keeps its traceback.
    """


class MissingPackageError(InputError, ImportError):
    """A package is not installed that a setting needs. The message names both, and the command that installs it."""


class OneLineParser(argparse.ArgumentParser):
    """Says in one line, without its usage, what it cannot read."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
