"""`hpcfed watch`: a run, its seeds or a study while it goes on, from its files alone.

`looking` reads a run and `frame` draws it; `study` reads and draws a study; `watching`
goes on looking until the end.
"""
