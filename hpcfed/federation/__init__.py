"""What a method sees: the federation, its cohorts, aggregation, selection and
clustering.
"""
