"""The training report: what runs logged, drawn and put in words. Importing it takes neither torch nor matplotlib."""

__all__ = ["save_report"]


def __getattr__(name: str):
    # Loaded at first use: a report of files needs no more than its part of this package
    if name != "save_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .write import save_report

    return save_report
