"""A course on sharding: lessons with a hole to fill, and a checker that names mistakes."""
