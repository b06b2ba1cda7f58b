"""
Stability under staleness: BAPO against what users would pick instead, by the updates between two generations.

    python -m benchmarks.stability --preset quick          # minutes: does it run; written to outputs/
    python -m benchmarks.stability --preset full --jobs 2  # the study of docs/results.md
    python -m benchmarks.stability --preset gpu            # the same on a GPU, with four times the updates

Each run is a process of its own on one thread. All arms share task, warm start, order of the problems, and the number
of generated completions and of updates. The learning rate of each arm is chosen from one grid, on seeds that are not
reported.

The presets full and gpu go on from the rows in `benchmarks/results/stability*.json`, one for each run: no run is made
that has a row there. An arm that is added makes its own runs only. Rows of an arm that is taken out stay. An
interrupted study goes on where it stopped, from the `--finished` file. After a change to what a run does, begin with
another `--finished` file and without the rows.

`arms` says what is compared, `plan` which runs that takes, `rows` makes them into rows, `summary` has the statistics
of the rows, `section` and `figures` are what the pages show of them.
"""
