"""Errors that a user can fix. The command line prints their message without a traceback."""

import argparse
from typing import NoReturn


class InputError(ValueError):
    """
    Error for a setting, file, dataset, reward or package that cannot be used. The message names it and the fix.

    Any other exception is a bug, or comes from the user's own code, and is shown with its traceback.
    """


class MissingPackageError(InputError, ImportError):
    """Error for a package that a setting needs and that is not installed. The message has the install command."""


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
