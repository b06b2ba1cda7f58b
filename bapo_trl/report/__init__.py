"""The training report: what runs logged, drawn and put in words. Importing it takes neither torch nor matplotlib."""

from .command import save_report


__all__ = ["save_report"]
