"""`bapo-trl compare`: train with several methods on one task, over several seeds, and compare their accuracy."""
