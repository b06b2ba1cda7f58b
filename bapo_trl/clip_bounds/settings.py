"""Names that settings of the search and of the loss take."""

from dataclasses import fields

from .grid import BoundGrid


SCOPES = ("batch", "micro_batch", "carried_over")
BOUND_PARTS = tuple(part.name for part in fields(BoundGrid))
