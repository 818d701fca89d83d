"""The most memory that a run has used so far."""

import resource
import sys

import jax


def measure_peak_bytes() -> int:
    """Returns the peak bytes of the fullest device here, or of the process if devices report none (CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    if peaks:
        return max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
