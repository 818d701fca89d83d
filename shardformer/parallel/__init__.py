"""The mesh of devices, and each parameter's PartitionSpec on it."""
