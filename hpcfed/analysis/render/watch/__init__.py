"""`hpcfed watch`: shows a run, its seeds or a study in progress, only from its files.

`looking` reads a run and `frame` draws it; `study` reads and draws a study; `watching`
repeats this until the end.
"""
