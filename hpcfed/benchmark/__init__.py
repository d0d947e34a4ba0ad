"""Benchmarks with rules: fixed settings of `hpcfed run`, one figure of merit, and a proof
that the work was done right.

`definition` reads what a benchmark is, `running` makes its runs, `reference` holds what
runs must learn, `verification` judges them, `result` writes the verdict down,
`comparison` sets machines beside each other, and `machines_page` publishes them.
"""
