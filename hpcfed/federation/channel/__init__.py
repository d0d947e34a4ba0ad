"""Between client and server: devices and their time, privacy, and compression.

`build` puts the channel of a run together from these parts; `channel` says what a part is.
"""
