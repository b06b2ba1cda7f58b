"""Overlapped generation: a vLLM server samples the next rollout batch while the trainer trains on this one."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from accelerate.utils import gather_object

from ..batch.injected import InjectedRollouts, check_token_ids_suffice
from ..checkpoints.rank_errors import on_main_process
from ..checkpoints.rank_files import RankFiles
from ..checkpoints.stop_signals import is_stopped
from ..parts import Part
from .read_ahead import ReadAhead


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


class Overlap(Part):
    """
    Completions that are requested one generation step before they are trained on.

    All ranks make the same calls in the same order. A thread of the main process waits for the server's answer.
    `refresh` sends the weights, and checks with the given rollouts that the server has loaded them. The server must be
    up when a run begins.

    Invariant: completions that were requested are trained on once, or generated again.
    """

    def __init__(self, refresh: Callable[[InjectedRollouts], None]):
        self._refresh = refresh

    def reset(self, run):
        check_token_ids_suffice(run, "overlapped generation", "`overlap_generation` to False")
        self._run, self._read_ahead = run, None
        self._client = run.vllm_generation.vllm_client if run.accelerator.is_main_process else None
        self._requested: Requested | None = None
        self._is_restored = False  # whether the request comes from a checkpoint
        self.drop()  # the request of an earlier run

    def batches(self, epoch, count, clock):
        run = self._run
        if self._read_ahead is None:
            loader, size = run.callback_handler.train_dataloader, run.args.micro_batches_per_generation
            epochs = run.first_epoch, run.state.num_train_epochs
            self._read_ahead = ReadAhead(loader, size, clock.micro_batch, *epochs)
        num_left = (run.state.max_steps - clock.version - 1) * run.args.gradient_accumulation_steps
        taken = self._read_ahead.take(epoch, clock.micro_batch, count, num_left)
        if self._read_ahead.has_skipped:
            self.drop()
        return iter(taken)

    def sample(self, rows, clock):
        """
        Return completions, and request those of the next generation step.

        The returned completions were requested one generation step ago. Without a request, or if it failed, the
        current policy samples them now. So it does in a run that was resumed within a generation step: the restored
        request is then for the next one.
        """
        next_rows = self._read_ahead.at(clock.micro_batch - clock.place + self._run.args.micro_batches_per_generation)
        with self._run.phase_clock.phase("waiting"):
            rollouts = self._take(rows, clock.version, is_next=clock.place == 0)
            self._refresh(rollouts)
            if next_rows is not None and self._requested is None:
                self._request(self._tokenize(next_rows), clock.version)
        return rollouts

    def _tokenize(self, rows: Rows) -> Prompts:
        return self._run._tokenize_prompts([row["prompt"] for row in rows])[0]

    def _ask(self, prompt_ids: Prompts) -> Completions:
        """Have TRL generate once, for the prompts of all ranks."""
        generate, count = self._run.vllm_generation.generate, self._run.num_generations
        _, token_ids, logps, _ = generate(prompts=prompt_ids, images=None, num_generations=count)
        return token_ids, [[values[0] for values in row] for row in logps]

    def _request(self, prompt_ids: Prompts, version: int) -> None:
        with nullcontext() if self._client is None else self._client.requesting():
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
        if not self._run.server_retries.has_same_server():  # else it was restarted, without the weights
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
            sampled = self._run._generate_single_turn(prompt_ids, None, {}, self._run.num_generations)
            requested = Requested(prompt_ids, version, *sampled)
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

    def before_evaluation(self, dataloader):
        self.collect()

    # Checkpoints

    def save(self, folder, clock):
        """Wait for the requested completions, and write them."""

        def limit_s() -> float | None:
            return SIGNAL_WAIT_S if is_stopped(self._run) else None

        if self._requested is None:
            return
        accelerator = self._run.accelerator
        if self.collect(limit_s):
            FILES.write(folder, accelerator.process_index, accelerator.num_processes, asdict(self._requested))
        elif accelerator.is_main_process:
            seconds = limit_s()
            limit = "" if seconds is None else f" within {seconds:g} seconds"
            warnings.warn(
                f"The vLLM server has not answered{limit}, so the checkpoint has no requested completions. A resumed "
                "run generates them again, with its current weights."
            )

    def load(self, folder):
        """Restore the requested completions, if the checkpoint has any for as many ranks."""
        path = FILES.path(folder, self._run.accelerator.process_index, self._run.accelerator.num_processes)
        if path.exists():
            self._requested, self._is_restored = Requested(**FILES.read(path)), True

    def load_together(self, folder):
        if not all(gather_object([self._requested is not None])):
            self.drop()

    def dispensable(self, file):
        return FILES.num_ranks_of(file) is not None
