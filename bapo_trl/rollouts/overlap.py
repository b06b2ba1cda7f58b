"""Overlapped generation: a vLLM server samples the next rollout batch while the trainer trains on this one."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from ..batch.injected import InjectedRollouts
from ..checkpoints.rank_errors import on_main_process
from ..checkpoints.rank_files import RankFiles
from ..checkpoints.stop_signals import is_stopped
from ..parts import Part
from .read_ahead import ReadAhead
from .token_ids import check_token_ids_suffice


FILES = RankFiles(
    "requested completions",
    "1",
    "remove its files: the resumed run then has the server generate the completions again",
)

SIGNAL_WAIT_S = 20.0
"""Seconds that a save after a signal waits for the requested completions."""

Rows = list[dict[str, Any]]  # examples of the dataset
Prompts = list[list[int]]
Completions = tuple[list[list[int]], list[list[float | None]]]  # token ids, and the sampler's log-probabilities


@dataclass
class Requested:
    """One rank's part of a rollout batch: the prompts, and the completions once the server has sent them."""

    prompt_ids: Prompts
    version: int  # policy version that samples the completions
    token_ids: list[list[int]] | None = None
    logps: list[list[float | None]] | None = None  # of each token, under that policy


class OverlappedGeneration:
    """
    Completions that are requested one generation step before they are trained on.

    All ranks make the same calls in the same order. `client` is the main process's client, `None` on other ranks; a
    thread waits for its answer. `tokenize` turns examples of the dataset into prompts. `ask` has TRL generate once
    for the prompts of all ranks. `sample` sends the weights first, and retries after failures. `refresh` sends the
    weights, and checks with the given rollouts that the server has loaded them. `is_same_server` returns whether the
    server is still the one that got the weights, and was not restarted.

    Invariant: completions that were requested are trained on once, or generated again.
    """

    def __init__(
        self,
        client: Any | None,
        *,
        tokenize: Callable[[Rows], Prompts],
        ask: Callable[[Prompts], Completions],
        sample: Callable[[Prompts], Completions],
        refresh: Callable[[InjectedRollouts], None],
        is_same_server: Callable[[], bool],
    ):
        self._client, self._tokenize, self._ask, self._sample = client, tokenize, ask, sample
        self._refresh, self._is_same_server = refresh, is_same_server
        self._requested: Requested | None = None
        self._is_restored = False  # whether the request comes from a checkpoint
        self.drop()  # the request of an earlier run

    def take(self, inputs: Rows, next_inputs: Rows | None, version: int, is_next: bool) -> InjectedRollouts:
        """
        Return completions for `inputs`, and request completions for `next_inputs`, `None` in the last generation step.

        The returned completions were requested one generation step ago. Without a request, or if it failed, the
        current policy samples them now. So it does in a run that was resumed within a generation step, where `is_next`
        is `False`: the request is then for the next generation step.
        """
        rollouts = self._take(inputs, version, is_next)
        self._refresh(rollouts)
        if next_inputs is not None and self._requested is None:
            self._request(self._tokenize(next_inputs), version)
        return rollouts

    def _request(self, prompt_ids: Prompts, version: int) -> None:
        if self._client is None:
            self._ask(prompt_ids)
        else:
            with self._client.requesting():
                self._ask(prompt_ids)
        self._requested = Requested(prompt_ids, version)

    def collect(self, limit_s: Callable[[], float | None] = lambda: None) -> bool:
        """
        Wait for the requested completions; return `False` if the request failed or took too long.

        The limit may change while the main process waits.
        """
        requested = self._requested
        if requested is None or requested.token_ids is not None:
            return True
        if not on_main_process(lambda: self._client.has_answer(limit_s)):
            return False
        if not self._is_same_server():
            self.drop()
            return False
        requested.token_ids, requested.logps = self._ask(requested.prompt_ids)
        return True

    def drop(self) -> None:
        """Discard the requested completions."""
        self._requested, self._is_restored = None, False
        if self._client is not None:
            self._client.drop_request()

    def _take(self, inputs: Rows, version: int, is_next: bool) -> InjectedRollouts:
        requested, is_restored = None, False
        if is_next:
            has_come, is_restored = self.collect(), self._is_restored
            requested = self._requested if has_come else None
            self._requested, self._is_restored = None, False
        # If the prompts differ on any rank, all ranks sample
        if requested and is_restored and any(gather_object([requested.prompt_ids != self._tokenize(inputs)])):
            warnings.warn(
                "The completions in the checkpoint have other prompts than this generation step, and are generated "
                "again. The data, the chat template or the number of samples per generation step has changed."
            )
            requested = None
        if requested is None:
            prompt_ids = self._tokenize(inputs)
            requested = Requested(prompt_ids, version, *self._sample(prompt_ids))
        token_ids, logps = requested.token_ids or [], requested.logps or []
        return InjectedRollouts(
            copy.deepcopy(inputs),
            requested.prompt_ids,
            token_ids,
            behavior_logps=logps,
            versions=[[requested.version] * len(row) for row in token_ids],
            sampler_logps=logps,
            is_ahead=requested.version < version,
        )

    # Checkpoints

    def save(self, folder: str | Path, rank: int, num_ranks: int, limit_s: Callable[[], float | None]) -> None:
        """Wait for the requested completions of a rank, and write them into a checkpoint folder."""
        if self._requested is None:
            return
        if self.collect(limit_s):
            FILES.write(folder, rank, num_ranks, asdict(self._requested))
        elif rank == 0:
            seconds = limit_s()
            limit = "" if seconds is None else f" within {seconds:g} seconds"
            warnings.warn(
                f"The vLLM server has not answered{limit}, so the checkpoint has no requested completions. A resumed "
                "run generates them again, with its current weights."
            )

    def load(self, folder: str | Path, rank: int, num_ranks: int) -> None:
        """Restore the requested completions of a rank from a checkpoint folder, if it has any."""

        def load_state_dict(state: dict[str, Any]) -> None:
            self._requested, self._is_restored = Requested(**state), True

        FILES.load(folder, rank, num_ranks, load_state_dict, deal_out)

    def keep_if_all_have_them(self) -> None:
        """Discard the restored completions unless all ranks found theirs. All ranks make this call together."""
        if not all(gather_object([self._requested is not None])):
            self.drop()


def deal_out(states: Iterable[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return one rank's part of the completions that another number of ranks saved: equal parts, in order."""
    states = list(states)
    names = ("prompt_ids", "token_ids", "logps")
    rows = {name: [row for state in states for row in state[name]] for name in names}
    count = len(rows["prompt_ids"]) // num_ranks
    part = slice(rank * count, (rank + 1) * count)
    return {"version": states[0]["version"]} | {name: values[part] for name, values in rows.items()}


class Overlap(Part):
    """
    Overlapped generation as a part of the trainer. The server must be up when a run begins.

    `refresh` sends the weights, and checks with the given rollouts that the server has loaded them.
    """

    def __init__(self, refresh: Callable[[InjectedRollouts], None]):
        self._refresh = refresh

    def reset(self, run):
        check_token_ids_suffice(run, "overlapped generation", "`overlap_generation` to False")
        vllm, self._run, self._read_ahead = run.vllm_generation, run, None

        def ask(prompt_ids: Prompts) -> Completions:
            _, token_ids, logps, _ = vllm.generate(
                prompts=prompt_ids, images=None, num_generations=run.num_generations
            )
            return token_ids, [[values[0] for values in row] for row in logps]

        self._generation = OverlappedGeneration(
            vllm.vllm_client if run.accelerator.is_main_process else None,
            tokenize=lambda rows: run._tokenize_prompts([row["prompt"] for row in rows])[0],
            ask=ask,
            sample=lambda prompt_ids: run._generate_single_turn(prompt_ids, None, {}, run.num_generations),
            refresh=self._refresh,
            is_same_server=run.server_retries.has_same_server,
        )

    def batches(self, epoch, count, clock):
        run = self._run
        if self._read_ahead is None:
            loader, size = run.callback_handler.train_dataloader, run.args.micro_batches_per_generation
            epochs = run.first_epoch, run.state.num_train_epochs
            self._read_ahead = ReadAhead(loader, size, clock.micro_batch, *epochs)
        num_left = (run.state.max_steps - clock.version - 1) * run.args.gradient_accumulation_steps
        taken = self._read_ahead.take(epoch, clock.micro_batch, count, num_left)
        if self._read_ahead.has_skipped:
            self._generation.drop()
        return iter(taken)

    def sample(self, rows, clock):
        next_rows = self._read_ahead.at(clock.micro_batch - clock.place + self._run.args.micro_batches_per_generation)
        with self._run.phase_clock.phase("waiting"):
            return self._generation.take(rows, next_rows, clock.version, is_next=clock.place == 0)

    def before_evaluation(self):
        self._generation.collect()

    def save(self, folder, clock):
        rank, num_ranks = self._run.accelerator.process_index, self._run.accelerator.num_processes
        self._generation.save(folder, rank, num_ranks, lambda: SIGNAL_WAIT_S if is_stopped(self._run) else None)

    def load(self, folder):
        self._generation.load(folder, self._run.accelerator.process_index, self._run.accelerator.num_processes)

    def load_together(self, folder):
        self._generation.keep_if_all_have_them()

    def dispensable(self, file):
        return FILES.num_ranks_of(file) is not None
