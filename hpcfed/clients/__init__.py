"""The batched engine: train and evaluate the rows of many clients at once, and place
clients on ranks.
"""
