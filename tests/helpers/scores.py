"""Log-probabilities by plain forward passes, as an oracle for what a run of several policies trains on."""

from collections.abc import Callable, Iterable

import torch


@torch.no_grad()
def score(model, prompt_ids: torch.Tensor, token_ids: torch.Tensor, weights: dict | None = None) -> torch.Tensor:
    """Return the log-probability of each token after the prompt, under other weights of the model if there are any."""
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    logits = model(torch.cat([prompt_ids, token_ids]).unsqueeze(0)).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, token_ids.unsqueeze(1)).squeeze(1)


def assert_scored_by_its_policy(
    rows: Iterable, score_by: Callable, rtol: float = 0.0, atol: float = 1e-5, least_share: float | None = 0.25
) -> None:
    """
    See that each token has the log-probabilities of the policy that sampled it.

    A row is prompt ids, token ids, the version of each token, and kinds of log-probabilities; `score_by` is called
    with a version and the ids. More than `least_share` of the rows have several versions; `None` for none of them.
    """
    rows = list(rows)
    several = sum(len(versions.unique()) > 1 for _, _, versions, *_ in rows)
    assert several == 0 if least_share is None else several > least_share * len(rows)
    for prompt_ids, token_ids, versions, *kinds in rows:
        assert versions.tolist() == sorted(versions.tolist())
        for version in versions.unique().tolist():
            here = versions == version
            expected = score_by(version, prompt_ids, token_ids)[here]
            for logps in kinds:
                torch.testing.assert_close(logps[here], expected, rtol=rtol, atol=atol)
