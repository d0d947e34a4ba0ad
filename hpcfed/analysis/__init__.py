"""Results of runs and studies: collect, compare, draw and print them."""
