"""The batched engine: train and evaluate many clients' rows at once, and place them."""
