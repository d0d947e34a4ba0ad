"""Render findings: on a terminal, on a page, as charts and as files."""
