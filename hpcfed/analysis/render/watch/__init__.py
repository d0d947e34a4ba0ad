"""`hpcfed watch`: a run, its seeds or a study while it goes on, from its files alone.

`looking` reads runs and `trials` studies; `frame` draws them on a terminal and `lines`
puts them into a log; `command` goes on looking until the end.
"""
