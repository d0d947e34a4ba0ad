"""The Python interface behind `hpcfed.run`, `hpcfed.open` and `hpcfed.study`.

`running` makes a run in this process, `opened` reads one back as tables, and `sweep`
runs a study.
"""
