"""Several processes that train together: their number, how they find and watch each other."""
