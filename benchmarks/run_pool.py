"""A pool of training runs, each in a process of its own, which keeps finished runs in a file."""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path

from bapo_trl.tasks import warm_start_path
from benchmarks import training_run
from benchmarks.training_run import TASKS


def run_key(spec: dict) -> str:
    """Return the key of a run, the same for equal specs."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def build_warm_starts(specs: Sequence[dict]) -> None:
    """Build the models that runs of [`~benchmarks.training_run.run`] start from, so that no run has to."""
    for name in sorted({spec.get("task", "sums") for spec in specs}):
        warm_start_path(task=TASKS[name]())


def run_all(
    specs: Sequence[dict],
    finished: Path,
    jobs: int,
    run: Callable[[dict], dict] = training_run.run,
    prepare: Callable[[Sequence[dict]], object] = build_warm_starts,
) -> list[dict | None]:
    """
    Make runs, each in a process of its own, `jobs` at a time with one thread each.

    Args:
        specs (sequence of `dict`):
            What `run` takes.
        finished (`Path`):
            File of finished runs, a line of JSON each. Runs that it holds are not made again, so it must not hold
            those of another version of `run`.
        jobs (`int`):
            Number of processes at a time. With 0, no run is made, and the result of one that is missing is `None`.
        run (`Callable`, *optional*, defaults to [`~benchmarks.training_run.run`]):
            Makes a run from its spec, a module's own function. Its result has `held_out` and `seconds`.
        prepare (`Callable`, *optional*, defaults to [`build_warm_starts`]):
            Makes what all missing runs read, before the first.

    Returns:
        `list[dict | None]`: The results, in the order of the specs.

    Raises:
        RuntimeError: If a run fails; it has printed why.
    """
    finished.parent.mkdir(parents=True, exist_ok=True)
    results = _read(finished)
    missing = {run_key(spec): spec for spec in specs if run_key(spec) not in results}
    print(f"{len(specs) - len(missing)} of {len(specs)} runs are there.", flush=True)
    if not jobs:
        return [results.get(run_key(spec)) for spec in specs]
    prepare(list(missing.values()))
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of the processes
    with ThreadPoolExecutor(jobs) as pool, open(finished, "a") as file:
        keys = {pool.submit(_run_in_process, run, spec): key for key, spec in missing.items()}
        try:
            for future in as_completed(keys):
                key = keys[future]
                results[key] = result = future.result()
                file.write(json.dumps({"key": key, "spec": missing[key], "result": result}) + "\n")
                file.flush()
                print(f"{len(results)}: {missing[key]} -> {result['held_out'][-1]}, {result['seconds']} s", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return [results[run_key(spec)] for spec in specs]


def _read(finished: Path) -> dict[str, dict]:
    """Return the results of finished runs by key. A last line that was cut off is left out, and removed."""
    lines = finished.read_text().splitlines(keepends=True) if finished.exists() else []
    if lines and not lines[-1].endswith("\n"):
        print(f"{finished} ends in the middle of a run, which is made again.")
        finished.write_text("".join(lines := lines[:-1]))
    return {line["key"]: line["result"] for line in map(json.loads, lines)}


def _run_in_process(run: Callable[[dict], dict], spec: dict) -> dict:
    """Return the result of a run that a process of its own makes, forked from one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(run, spec, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    if result is None:
        raise RuntimeError(f"The run {spec} ended with exit status {process.exitcode}, see what it printed above.")
    return result


def _send_result(run: Callable[[dict], dict], spec: dict, sender: Connection) -> None:
    sender.send(run(spec))
