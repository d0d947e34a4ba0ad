"""What a method sees: the federation, its cohorts, the round's log, aggregation,
selection and clustering.
"""
