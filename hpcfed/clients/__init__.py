"""The batched engine: advance and evaluate many clients at once, and place clients on
ranks.
"""
