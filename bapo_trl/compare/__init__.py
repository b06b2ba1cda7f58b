"""`bapo-trl compare`: several methods on one task, over seeds, and what their differences say."""
