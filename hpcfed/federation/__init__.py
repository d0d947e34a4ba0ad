"""What a method sees: federation, cohorts, log, aggregation, selection, clusters."""
