"""What a person looks at: records, curves and progress of a run, and its cost before it is paid for."""
