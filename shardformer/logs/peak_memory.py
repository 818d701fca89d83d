"""The most memory that a run has used so far."""

import resource
import sys

import jax


def measure_peak_bytes() -> int:
    """Of the fullest device of this process; of the process itself where devices do not tell, as CPUs do not."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    if peaks:
        return max(peaks)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
