"""Names that settings of the search and of the loss take."""

from dataclasses import fields

from .grid import BoundGrid


SCOPES = ("batch", "micro_batch", "carried_over")
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
UNCLIPPED_LOSS_TYPES = ("cispo", "sapo", "vespo")  # without clip bounds to search
BOUND_PARTS = tuple(part.name for part in fields(BoundGrid))
