"""Between client and server: devices and their time, privacy, and compression.

`build` puts the way of a run together from these parts; `federation/channel/channel.py` says what a
part is.
"""
