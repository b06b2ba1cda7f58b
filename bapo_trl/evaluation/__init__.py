"""
Measure the accuracy of a model on a dataset: sample completions, score them, and compute avg@k, pass@k and maj@k.

```python
trainer = EvaluatedTrainer(...)  # same arguments as BAPOTrainer
before = evaluate(trainer, dataset, Path("before.jsonl"))
print(accuracy_table({"before": before.accuracies}))
```
"""

import importlib


__all__ = ["EvaluatedTrainer", "Evaluation", "accuracy_table", "evaluate"]

_HOMES = {
    "EvaluatedTrainer": "sampling",
    "Evaluation": "measure",
    "accuracy_table": "accuracy",
    "evaluate": "measure",
}


def __getattr__(name: str):
    # Imported at first use: `answers` and `accuracy` do not need the trainer
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
