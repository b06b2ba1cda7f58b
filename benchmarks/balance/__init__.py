"""
Which balance, when: a target for the share of positive tokens, reached by a weight, against the published methods.

    python -m benchmarks.balance --jobs 1

The harness and the rules are those of `benchmarks.stability`, whose rows of the published methods count here. Each run
is a process of its own on one thread. Finished runs are in `benchmarks/results/balance.json`, one row each, and are
not made again. An interrupted study goes on where it stopped, from the `--finished` file. With `--jobs 0`, what is
finished is written.

`arms` says what is compared, `plan` which runs that takes, `section` what the pages show of them.
"""
